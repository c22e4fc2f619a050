# Rscript cox.R patients.csv cox.json: Cox regressions by R's survival, stratified by hospital.
library(survival)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$row <- seq_len(nrow(d))
numbers <- function(fit) {
  s <- summary(fit)
  list(coef = unname(coef(fit)), se = unname(sqrt(diag(fit$var))), loglik = fit$loglik,
       score = unname(s$sctest[1]), concordance = unname(s$concordance)[1:2])
}
zph <- function(fit, transform) unname(cox.zph(fit, transform = transform)$table[, 1])
plain <- coxph(Surv(quarters, died) ~ age + stage + strata(hospital), d)
breslow <- coxph(Surv(quarters, died) ~ age + stage + strata(hospital), d, ties = "breslow")
robust <- coxph(Surv(quarters, died) ~ age + arm + strata(hospital), d, cluster = row)
late <- coxph(Surv(entry, months, died) ~ age + arm + strata(hospital), d)
weighted <- coxph(Surv(quarters, died) ~ age + arm + offset(shift) + strata(hospital), d, weights = weight,
                  cluster = row)
strata <- coxph(Surv(quarters, died) ~ age + arm + strata(ward) + strata(hospital), d)
cluster <- coxph(Surv(quarters, died) ~ age + arm + strata(hospital) + cluster(family), d)
found <- lapply(list(plain = plain, breslow = breslow, robust = robust, late = late, weighted = weighted,
                     strata = strata, cluster = cluster), numbers)
one <- coxph(Surv(months, died) ~ age + arm, d)
profiles <- data.frame(age = c(50, 70), arm = c("drugs", "surgery"))
curve <- summary(survfit(one, newdata = profiles, conf.type = "log-log"), times = c(6, 12, 24, 48))
found$survival <- list(survival = t(curve$surv), low = t(curve$lower), high = t(curve$upper))
found$zph <- list(log = zph(plain, "log"), identity = zph(plain, "identity"), late = zph(late, "log"))
found$version <- paste(R.version.string, "survival", packageVersion("survival"))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE)
