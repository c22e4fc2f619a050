# Rscript aft.R patients.csv aft.json: accelerated failure time models by R's survival.
library(survival)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
control <- survreg.control(rel.tolerance = 1e-13, maxiter = 100)
profiles <- data.frame(age = c(50, 70), stage = c("II", "III"))
numbers <- function(fit) {
  # The last parameter is log(scale), unless the scale is fixed.
  theta <- c(coef(fit), if (nrow(fit$var) > length(coef(fit))) log(fit$scale))
  list(params = unname(theta), se = unname(sqrt(diag(fit$var))), loglik = fit$loglik)
}
found <- list()
for (dist in c("weibull", "exponential", "lognormal", "loglogistic")) {
  fit <- survreg(Surv(months, died) ~ age + stage, d, dist = dist, control = control)
  found[[dist]] <- numbers(fit)
  log_time <- predict(fit, profiles, type = "uquantile", p = c(0.25, 0.5), se.fit = TRUE)
  found[[dist]]$log_time <- as.vector(t(log_time$fit))
  found[[dist]]$log_time_se <- as.vector(t(log_time$se.fit))
}
d$row <- seq_len(nrow(d))
found$robust <- numbers(survreg(Surv(months, died) ~ age + arm, d, dist = "lognormal", robust = TRUE, control = control))
weighted <- survreg(Surv(months, died) ~ age + arm + offset(shift), d, weights = weight, control = control)
# robust = TRUE leaves the weights out of the sandwich; coxph has them.
weighted$var <- crossprod(residuals(weighted, type = "dfbeta", weighted = TRUE))
found$weighted <- numbers(weighted)
found$cluster <- numbers(survreg(Surv(months, died) ~ age + arm + cluster(family), d, dist = "loglogistic",
                                 control = control))
found$ulm <- numbers(survreg(Surv(months, died) ~ age + arm, d, subset = hospital == "Ulm", control = control))
json <- function(x) {
  if (is.character(x)) return(paste0('"', x, '"'))
  if (!is.list(x)) return(paste0("[", paste(sprintf("%.15g", x), collapse = ", "), "]"))
  paste0("{", paste0('"', names(x), '": ', vapply(x, json, ""), collapse = ",\n"), "}")
}
found$version <- paste(R.version.string, "survival", packageVersion("survival"))
writeLines(json(found), args[2])
