# Rscript dispersed.R FOLDER: simulated counts and positive responses; mixed models with a dispersion by glmmTMB
# (Laplace's approximation), and by lme4 with 25 nodes at a known alpha. glmmTMB warns of singular convergence, as
# tolerances are as small as rounding permits.
suppressMessages({
  library(glmmTMB)
  library(lme4)
  library(jsonlite)
})
folder <- commandArgs(trailingOnly = TRUE)[1]
set.seed(7)
visits <- data.frame(patient = rep(1:48, each = 7), x = round(rnorm(336), 3), time = round(runif(336, 0.5, 2), 2))
visits <- visits[runif(336) < 0.9, ]
visits$site <- paste0("S", 1 + visits$patient %% 3)
mean <- exp(0.8 + 0.4 * visits$x + rnorm(48, 0, 0.6)[visits$patient] + rnorm(48, 0, 0.3)[visits$patient] * visits$x)
visits$count <- rnbinom(nrow(visits), size = 1.8, mu = mean * visits$time)
visits$cost <- round(rgamma(nrow(visits), shape = 2.5, scale = mean / 2.5), 4) + 1e-4
write.csv(visits, file.path(folder, "visits.csv"), row.names = FALSE)
precise <- glmmTMBControl(optCtrl = list(iter.max = 1000, eval.max = 1000, rel.tol = 1e-12, x.tol = 1e-10))
general <- function(formula, family) {
  m <- do.call(glmmTMB, list(formula, visits, family = family, control = precise))
  v <- VarCorr(m)$cond$patient
  log_phi <- sqrt(diag(vcov(m, full = TRUE)))[["d~(Intercept)"]]
  phi <- if (family$family == "Gamma") sigma(m)^2 else 1 / sigma(m)
  list(coef = unname(fixef(m)$cond), se = unname(coef(summary(m))$cond[, 2]), variances = v[lower.tri(v, TRUE)],
       llf = c(logLik(m)), dispersion = phi, log_error = log_phi, conditional = unname(predict(m, type = "response")[1:5]))
}
offset <- count ~ x + offset(log(time)) + (1 | patient)
out <- list(
  counts = general(offset, nbinom2()),
  counts_slopes = general(count ~ x + offset(log(time)) + (1 + x | patient), nbinom2()),
  costs = general(cost ~ x + (1 | patient), Gamma("log")),
  costs_slopes = general(cost ~ x + (1 + x | patient), Gamma("log"))
)
exact <- glmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-9, maxfun = 1e5), tolPwrss = 1e-10)
# The likeliest alpha with 25 nodes, as fedstat finds it.
alpha <- 0.750115571700
m <- glmer(offset, visits, family = MASS::negative.binomial(1 / alpha), nAGQ = 25, control = exact)
out$known_alpha <- list(alpha = alpha, coef = unname(fixef(m)), theta = unname(getME(m, "theta")))
out$version <- paste(R.version.string, "glmmTMB", packageVersion("glmmTMB"), "lme4", packageVersion("lme4"))
write_json(out, file.path(folder, "dispersed.json"), digits = NA, auto_unbox = TRUE, pretty = TRUE)
