# Rscript cox_common.R patients.csv cox_common.json: Cox regressions with one baseline for all hospitals, by R's
# survival, on times that are rounded up to a grid.
library(survival)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$row <- seq_len(nrow(d))
grid <- 6
up <- function(x) pmin(ceiling(x / grid) * grid, 48)
d$died6 <- d$died * (d$months <= 48)
d$stop6 <- up(d$months)
d$start6 <- ceiling(d$entry / grid) * grid
numbers <- function(fit) {
  list(coef = unname(coef(fit)), se = unname(sqrt(diag(fit$var))), loglik = fit$loglik)
}
zph <- function(fit, transform) unname(cox.zph(fit, transform = transform)$table[, 1])
plain <- coxph(Surv(stop6, died6) ~ age + stage, d, control = coxph.control(eps = 1e-12, toler.chol = 1e-13))
exact <- coxph.control(eps = 1e-12, toler.chol = 1e-13)
fits <- list(
  plain = plain,
  breslow = coxph(Surv(stop6, died6) ~ age + stage, d, ties = "breslow", control = exact),
  robust = coxph(Surv(stop6, died6) ~ age + arm, d, cluster = row, control = exact),
  late = coxph(Surv(start6, stop6, died6) ~ age + arm, d[d$start6 < d$stop6, ], control = exact),
  weighted = coxph(Surv(stop6, died6) ~ age + arm + offset(shift), d, weights = weight, cluster = row,
                   control = exact),
  strata = coxph(Surv(stop6, died6) ~ age + arm + strata(ward), d, control = exact),
  cluster = coxph(Surv(stop6, died6) ~ age + arm + cluster(family), d, control = exact),
  site = coxph(Surv(stop6, died6) ~ age + hospital, d, control = exact))
found <- lapply(fits, numbers)
found$zph <- list(log = zph(plain, "log"), identity = zph(plain, "identity"), late = zph(fits$late, "log"))
profiles <- data.frame(age = c(50, 70), arm = c("drugs", "surgery"))
one <- coxph(Surv(stop6, died6) ~ age + arm, d, control = exact)
curve <- summary(survfit(one, newdata = profiles, conf.type = "log-log"), times = c(6, 12, 24, 48))
found$survival <- list(survival = t(curve$surv), low = t(curve$lower), high = t(curve$upper))
found$version <- paste(R.version.string, "survival", packageVersion("survival"))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE)
