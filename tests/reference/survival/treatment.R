# Rscript treatment.R patients.csv treatment.json: weighted curves and Cox regressions by R's survival.
# Errors "robust" take the weights as known. Errors "stacked" add the estimated propensity: the influence of each
# row, plus the numerical derivative of the estimate by the coefficients, times the row's influence on these.
library(survival)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$treated <- as.numeric(d$arm == "surgery")
d$months <- 3 * d$quarters  # at the ends of the grid
d$row <- seq_len(nrow(d))
d$state <- factor(d$cause, levels = c("none", "death", "relapse"))
until <- 36
grid <- seq(3, until, 3)
propensity <- glm(treated ~ age + stage, binomial, d, control = list(epsilon = 1e-14, maxit = 50))
Z <- model.matrix(propensity)
influence <- (Z * (d$treated - fitted(propensity))) %*% summary(propensity)$cov.unscaled
tilt <- list(ATE = function(e) 1, ATT = function(e) e, ATC = function(e) 1 - e, ATO = function(e) e * (1 - e))
weights_at <- function(gamma, estimand) {
  e <- plogis(drop(Z %*% gamma))
  tilt[[estimand]](e) * (d$treated / e + (1 - d$treated) / (1 - e))
}
# Estimate (k), and influences of the rows with known weights (n, k), by the weights.
hazard <- function(ties) function(w) {
  f <- coxph(Surv(months, died) ~ treated + strata(hospital), d, weights = w, ties = ties, robust = TRUE,
             control = coxph.control(eps = 1e-13, iter.max = 50))
  list(estimate = unname(coef(f)), rows = as.matrix(residuals(f, "dfbeta", weighted = TRUE)))
}
common <- function(w) {
  f <- coxph(Surv(months, died) ~ treated, d, weights = w, robust = TRUE,
             control = coxph.control(eps = 1e-13, iter.max = 50))
  list(estimate = unname(coef(f)), rows = as.matrix(residuals(f, "dfbeta", weighted = TRUE)))
}
arms <- function(one) function(w) {  # an estimate of each arm, and the second arm's less the first one's
  found <- lapply(0:1, function(a) {
    inside <- d$treated == a
    # By name in the global environment, where the residuals of a curve look for them.
    some <<- d[inside, ]
    given <<- w[inside]
    part <- one()
    rows <- matrix(0, nrow(d), length(part$estimate))
    rows[inside, ] <- part$rows
    list(estimate = part$estimate, rows = rows)
  })
  list(estimate = c(found[[1]]$estimate, found[[2]]$estimate, found[[2]]$estimate - found[[1]]$estimate),
       rows = cbind(found[[1]]$rows, found[[2]]$rows, found[[2]]$rows - found[[1]]$rows))
}
survival <- arms(function() {
  f <- survfit(Surv(months, died) ~ 1, some, weights = given, robust = TRUE, id = row)
  list(estimate = summary(f, times = grid, extend = TRUE)$surv,
       rows = residuals(f, times = grid, type = "pstate", weighted = TRUE))
})
rmean <- arms(function() {
  f <- survfit(Surv(months, died) ~ 1, some, weights = given, robust = TRUE, id = row)
  list(estimate = unname(summary(f, rmean = until)$table["rmean"]),
       rows = as.matrix(residuals(f, times = until, type = "rmst", weighted = TRUE)))
})
incidence <- arms(function() {
  f <- survfit(Surv(months, state) ~ 1, some, weights = given, robust = TRUE, id = row)
  rows <- residuals(f, times = grid, type = "pstate", weighted = TRUE)
  list(estimate = c(summary(f, times = grid, extend = TRUE)$pstate[, 2:3]),
       rows = cbind(rows[, , 2], rows[, , 3]))
})
both <- function(of, estimand) {
  at <- function(gamma) of(weights_at(gamma, estimand))
  here <- at(coef(propensity))
  slope <- sapply(seq_along(coef(propensity)), function(j) {
    h <- 1e-4 / max(abs(Z[, j])) * (seq_along(coef(propensity)) == j)
    (8 * (at(coef(propensity) + h)$estimate - at(coef(propensity) - h)$estimate) -
       (at(coef(propensity) + 2 * h)$estimate - at(coef(propensity) - 2 * h)$estimate)) / (12 * h[j])
  })
  slope <- matrix(slope, length(here$estimate))
  list(estimate = here$estimate, robust = sqrt(colSums(here$rows^2)),
       stacked = sqrt(colSums((here$rows + influence %*% t(slope))^2)))
}
found <- lapply(setNames(nm = names(tilt)), function(estimand) list(
  hazard = both(hazard("efron"), estimand), breslow = both(hazard("breslow"), estimand),
  common = both(common, estimand), survival = both(survival, estimand), rmean = both(rmean, estimand),
  incidence = both(incidence, estimand)))
found$propensity <- unname(coef(propensity))
found$version <- paste(R.version.string, "survival", packageVersion("survival"))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE)
