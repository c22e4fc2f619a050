# Rscript curves.R patients.csv curves.json: survival curves and log-rank tests by R's survival.
library(survival)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$quarter <- 3 * ceiling(d$months / 3)
d$group <- paste(d$arm, d$stage)
curve <- function(type) {
  s <- summary(survfit(Surv(quarter, died) ~ arm, d, conf.type = type), censored = TRUE)
  list(group = as.character(s$strata), time = s$time, n_risk = s$n.risk, n_event = s$n.event,
       survival = s$surv, std_error = s$std.err, conf_low = s$lower, conf_high = s$upper)
}
fit <- survfit(Surv(quarter, died) ~ arm, d, conf.type = "log-log")
q <- quantile(fit, c(0.25, 0.5))
found <- list(
  loglog = curve("log-log"), log = curve("log"), plain = curve("plain"),
  quantile = list(estimate = unname(q$quantile), low = unname(q$lower), high = unname(q$upper)),
  rmean = unname(summary(fit, rmean = 48)$table[, 5:6]),
  logrank = survdiff(Surv(quarter, died) ~ group, d)$chisq,
  rho1 = survdiff(Surv(quarter, died) ~ group, d, rho = 1)$chisq,
  bysite = survdiff(Surv(months, died) ~ group + strata(hospital), d)$chisq,
  version = paste(R.version.string, "survival", packageVersion("survival")))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE, na = "null")
