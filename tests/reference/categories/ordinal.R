# Rscript ordinal.R grades.csv ordinal.json: cumulative link models by R's ordinal, with sandwich errors.
library(ordinal)
library(sandwich)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d$grade <- factor(d$grade, levels = c("poor", "fair", "good", "excellent"))
tight <- clm.control(gradTol = 1e-11, maxIter = 200)
numbers <- function(fit) {
  list(coef = unname(coef(fit)), se = unname(sqrt(diag(vcov(fit)))), loglik = as.numeric(logLik(fit)))
}
fit <- function(formula, ...) clm(formula, data = d, control = tight, ...)
formula <- grade ~ hours + tutor + track
logit <- fit(formula)
weighted <- clm(grade ~ hours + tutor + offset(shift), data = d, weights = weight, control = tight)
found <- lapply(list(logit = logit, probit = fit(formula, link = "probit"),
                     cloglog = fit(formula, link = "cloglog"), weighted = weighted), numbers)
bread <- vcov(logit)
scores <- estfun(logit)
clusters <- rowsum(scores, d$class)
found$HC0 <- list(se = unname(sqrt(diag(bread %*% crossprod(scores) %*% bread))))
found$cluster <- list(se = unname(sqrt(diag(bread %*% crossprod(clusters) %*% bread))), n = nrow(clusters))
nominal <- nominal_test(clm(grade ~ hours + tutor + track, data = d))
found$nominal <- list(lr = nominal$LRT[-1], df = nominal$Df[-1])
found$version <- paste(R.version.string, "ordinal", packageVersion("ordinal"))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE)
