# Pooled regressions of the tables of tests/models/impute/impute_simulation.py, imputed by mice's "norm".
# Rscript coverage.R tables.csv found.csv m
suppressMessages(library(mice))
arguments <- commandArgs(TRUE)
tables <- read.csv(arguments[1])
one <- function(imp, response, formula) {
  s <- summary(pool(with(imp, lm(formula(formula)))), conf.int = TRUE)
  data.frame(term = sub("(Intercept)", "Intercept", s$term, fixed = TRUE), estimate = s$estimate,
             std_error = s$std.error, conf_low = s[["2.5 %"]], conf_high = s[["97.5 %"]], response = response)
}
found <- lapply(split(tables, tables$run), function(table) {
  imp <- mice(table[names(table) != "run"], m = as.integer(arguments[3]), maxit = 10, method = "norm",
              seed = table$run[1] + 1, printFlag = FALSE)
  rbind(one(imp, "y", "y ~ x1 + x2 + x3 + x4"), one(imp, "x2", "x2 ~ y + x1"))
})
write.csv(do.call(rbind, found), arguments[2], row.names = FALSE)
