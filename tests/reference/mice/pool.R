# Rubin's rules as mice pools them, on imputations of its own example. Rscript pool.R > pool.json
suppressMessages(library(mice))
numbers <- function(x) paste0("[", paste(sprintf("%.15g", as.vector(x)), collapse = ", "), "]")
object <- function(x) {
  cells <- sapply(names(x), function(n) {
    paste0("\"", n, "\": ", if (is.list(x[[n]])) object(x[[n]]) else numbers(x[[n]]))
  })
  paste0("{", paste(cells, collapse = ",\n"), "}")
}
one <- function(imp, formula, family) {
  fits <- with(imp, glm(formula(formula), family = family))$analyses
  pooled <- pool(fits)
  s <- summary(pooled, conf.int = TRUE)
  list(
    params = do.call(rbind, lapply(fits, coef)),  # by column
    covs = do.call(c, lapply(fits, vcov)),
    df_resid = df.residual(fits[[1]]),
    estimate = s$estimate, std_error = s$std.error, statistic = s$statistic, df = s$df, p_value = s$p.value,
    low = s[["2.5 %"]], high = s[["97.5 %"]],
    within = pooled$pooled$ubar, between = pooled$pooled$b, total = pooled$pooled$t,
    riv = pooled$pooled$riv, lambda = pooled$pooled$lambda, fmi = pooled$pooled$fmi
  )
}
five <- mice(nhanes2, m = 5, seed = 3, printFlag = FALSE)
two <- mice(nhanes2, m = 2, seed = 4, printFlag = FALSE)
cat(object(list(
  linear = one(five, "chl ~ age + bmi", gaussian()),
  logistic = one(five, "hyp ~ bmi + chl", binomial()),
  two = one(two, "chl ~ bmi + hyp", gaussian())
)), "\n")
