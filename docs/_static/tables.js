// Tables of a page: cells know their column, for narrow screens, long code can break, and names of tests are folded.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table:not(.cell_output table)")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.innerText.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, place) => {
        cell.dataset.column = heads[place] || "";
        cell.classList.toggle("blank", !cell.innerText.trim());
        for (const code of cell.querySelectorAll("code .pre")) {
          code.replaceChildren(...code.textContent.split(/(?<=[.(=,])/).flatMap((part) => [part, document.createElement("wbr")]));
        }
        if (heads[place] !== "Tests") return;
        const folded = document.createElement("details");
        const count = document.createElement("summary");
        const tests = cell.querySelectorAll("code").length;
        count.textContent = tests === 1 ? "1 test" : `${tests} tests`;
        folded.append(count, ...cell.childNodes);
        cell.append(folded);
      });
    }
  }
});
