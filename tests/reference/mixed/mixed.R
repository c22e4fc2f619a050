# Rscript mixed.R FOLDER: mixed models by lme4, lmerTest and pbkrtest, and the data sets of lme4 that they use.
suppressMessages({
  library(lme4)
  library(lmerTest)
  library(jsonlite)
})
folder <- commandArgs(trailingOnly = TRUE)[1]
set.seed(1)
sleep <- sleepstudy
sleep$site <- paste0("S", 1 + as.integer(as.character(sleep$Subject)) %% 3)
sleep$weight <- round(runif(nrow(sleep), 0.5, 2), 2)
herds <- cbpp
herds$site <- paste0("S", 1 + as.integer(herds$herd) %% 3)
herds$healthy <- herds$size - herds$incidence
pastes <- expand.grid(cask = 1:6, batch = 1:30, KEEP.OUT.ATTRS = FALSE)[rep(1:180, each = 2), ]
pastes$plant <- paste0("P", 1 + pastes$batch %% 3)
pastes$x <- round(rnorm(nrow(pastes)), 2)
pastes <- pastes[runif(nrow(pastes)) < 0.85, ]
b <- rnorm(30, 0, 1.3)
k <- matrix(rnorm(180, 0, 2.9), 30)
pastes$strength <- round(60 + pastes$x + c(-1.5, 0.5, 2)[1 + pastes$batch %% 3] + b[pastes$batch] +
                           k[cbind(pastes$batch, pastes$cask)] + rnorm(nrow(pastes), 0, 0.8), 2)
pastes$cask <- paste(pastes$batch, pastes$cask)
write.csv(sleep, file.path(folder, "sleepstudy.csv"), row.names = FALSE)
write.csv(herds, file.path(folder, "cbpp.csv"), row.names = FALSE)
write.csv(pastes, file.path(folder, "pastes.csv"), row.names = FALSE)
exact <- lmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-12, maxfun = 1e5), calc.derivs = FALSE)
linear <- function(formula, data, reml, weights = rep(1, nrow(data))) {
  m <- do.call(lmerTest::lmer, list(formula, data, REML = reml, control = exact, weights = weights))
  v <- as.data.frame(VarCorr(m), order = "lower.tri")
  found <- list(coef = unname(fixef(m)), se = unname(coef(summary(m))[, 2]), df = unname(coef(summary(m))[, 3]),
                variances = v$vcov, llf = c(logLik(m)), aic = AIC(m), conditional = unname(predict(m)[1:5]),
                fixed = unname(predict(m, re.form = NA)[1:5]))
  if (reml) {
    kr <- coef(summary(m, ddf = "Kenward-Roger"))
    found$kr_se <- unname(kr[, 2])
    found$kr_df <- unname(kr[, 3])
  }
  found
}
out <- list()
for (reml in c(TRUE, FALSE)) {
  name <- if (reml) "reml" else "ml"
  out[[name]] <- list(
    slopes = linear(Reaction ~ Days + (1 + Days | Subject), sleep, reml),
    unbalanced = linear(Reaction ~ Days + (1 + Days | Subject), sleep[-(1:25), ], reml),
    intercepts = linear(Reaction ~ Days + (1 | Subject), sleep, reml),
    independent = linear(Reaction ~ Days + (1 + Days || Subject), sleep, reml),
    weighted = linear(Reaction ~ Days + (1 | Subject), sleep, reml, sleep$weight),
    nested = linear(strength ~ x + (1 | cask) + (1 | batch), pastes, reml),
    sites = linear(strength ~ x + (1 | cask) + (1 | plant), pastes, reml)
  )
}
precise <- glmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-9, maxfun = 1e5), tolPwrss = 1e-10,
                        calc.derivs = TRUE)
general <- function(formula, data, family, nAGQ) {
  m <- do.call(glmer, list(formula, data, family = family, nAGQ = nAGQ, control = precise))
  list(coef = unname(fixef(m)), se = unname(sqrt(diag(as.matrix(vcov(m))))), theta = unname(getME(m, "theta")),
       llf = c(logLik(m)), conditional = unname(predict(m, type = "response")[1:5]),
       fixed = unname(predict(m, re.form = NA, type = "response")[1:5]))
}
events <- herds[rep(seq_len(nrow(herds)), herds$size), ]
events$ill <- as.integer(ave(seq_len(nrow(events)), rep(seq_len(nrow(herds)), herds$size), FUN = seq_along) <=
                           events$incidence)
for (nodes in c(1, 9, 25)) {
  out$binomial[[paste0("n", nodes)]] <- general(cbind(incidence, healthy) ~ period + (1 | herd), herds,
                                                family = binomial, nAGQ = nodes)
  out$poisson[[paste0("n", nodes)]] <- general(incidence ~ period + offset(log(size)) + (1 | herd), herds,
                                               family = poisson, nAGQ = nodes)
}
out$binary <- general(ill ~ period + (1 | herd), events, family = binomial, nAGQ = 9)
# Intervals by profile likelihood: random effects and residuals, without the correlation.
profile <- function(m) unname(confint(m, parm = "theta_", method = "profile", quiet = TRUE))
out$profile <- list(
  slopes = profile(lme4::lmer(Reaction ~ Days + (1 + Days | Subject), sleep, REML = FALSE, control = exact))[-2, ],
  intercepts = profile(lme4::lmer(Reaction ~ Days + (1 | Subject), sleep, REML = FALSE, control = exact)),
  binomial = profile(glmer(cbind(incidence, healthy) ~ period + (1 | herd), herds, binomial, control = precise))
)
out$version <- paste(R.version.string, "lme4", packageVersion("lme4"), "lmerTest", packageVersion("lmerTest"),
                     "pbkrtest", packageVersion("pbkrtest"))
write_json(out, file.path(folder, "mixed.json"), digits = NA, auto_unbox = TRUE, pretty = TRUE)
