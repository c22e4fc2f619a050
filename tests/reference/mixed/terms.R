# Rscript terms.R FOLDER: terms of random effects in every spelling, with a coding of their own, in nested groups, and of
# columns far from zero, by lme4; and the data.
suppressMessages({
  library(lme4)
  library(jsonlite)
})
folder <- commandArgs(trailingOnly = TRUE)[1]
set.seed(11)
n <- 540
d <- data.frame(g = rep(1:60, each = 9), f = rep(c("a", "b", "c"), 180), x = round(rnorm(n), 2))
d$ward <- 1 + (d$g - 1) %/% 6
d$site <- paste0("S", 1 + d$ward %% 3)
d$place <- 1 + (d$g - 1) %% 6
d$year <- 2010 + rep(0:8, 60)[order(rep(1:60, each = 9), runif(n))]
d$z <- round(runif(n), 2)
u <- matrix(rnorm(60 * 7), 60)[d$g, ]
b <- d$f == "b"
k <- d$f == "c"
random <- u[, 1] + 0.8 * u[, 2] * d$x + 1.2 * u[, 3] * b + 1.1 * u[, 4] * k + 0.9 * (u[, 5] * b + u[, 6] * k) * d$x
year <- 0.3 * u[, 7] * (d$year - 2014)
d$y <- round(1 + 0.5 * d$x + b + random + year + rnorm(10, 0, 1.5)[d$ward] + rnorm(n, 0, 0.7), 3)
d$count <- rpois(n, exp(0.8 + 0.3 * d$x + 0.5 * random + 0.5 * year))
d$event <- as.integer(runif(n) < plogis(0.2 + 0.5 * d$x + 1.5 * u[, 1] + u[, 2] * d$x))
write.csv(d, file.path(folder, "terms.csv"), row.names = FALSE)
exact <- lmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-11, maxfun = 1e6), calc.derivs = FALSE,
                     check.conv.singular = "ignore")
precise <- glmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-9, maxfun = 1e6), tolPwrss = 1e-10,
                        check.conv.singular = "ignore")
fitted <- function(formula, family = NULL, data = d) {
  m <- if (is.null(family)) lmer(as.formula(formula), data, control = exact) else
    glmer(as.formula(formula), data, family = family, control = precise)
  v <- as.data.frame(VarCorr(m), order = "lower.tri")
  list(formula = formula, coef = unname(fixef(m)), names = names(fixef(m)), se = unname(sqrt(diag(as.matrix(vcov(m))))),
       llf = c(logLik(m)), variances = v$vcov[is.na(v$var2)], names_of_variances = paste(v$grp, v$var1)[is.na(v$var2)])
}
linear <- c(
  "y ~ f * x + (1 + x + x:f | g)", "y ~ x * f + (1 + f:x | g)", "y ~ f * x + (1 + x * f | g)", "y ~ x * z + (z:x | g)",
  "y ~ f + (0 + f | g)", "y ~ x + (f - 1 | g)", "y ~ f + (0 + f || g)", "y ~ f + x + (0 + x + f | g)",
  "y ~ f * x + (0 + f:x | g)", "y ~ 0 + f + (1 | g)", "y ~ x + (0 + z | g)", "y ~ f + (x | g)", "y ~ (x | g)",
  "y ~ x + (1 | ward/place)", "y ~ x + (1 | ward:place)", "y ~ x + (1 + x | ward:place) + (1 | ward)", "y ~ f/x + (1 | g)",
  "y ~ 0 + f/x + (f:x | g)", "y ~ x + (1 + I(x^2) | g)"
)
out <- list(linear = lapply(linear, fitted))
d$since <- d$year - 2014
out$year <- list(fitted("y ~ x + (1 + since | g)"), fitted("y ~ x + since + (0 + f + since | g)"),
                 fitted("y ~ since + (1 + since + I(since^2) | g)"))
out$poisson <- lapply(c("count ~ f + (0 + f | g)", "count ~ x + (1 + x:f | g)", "count ~ x + (1 | ward:place)", "count ~ x + (1 + since | g)"),
                      fitted, family = poisson)
out$binomial <- lapply(c("event ~ f + x + (1 + x | g)", "event ~ 0 + f + (1 | g)", "event ~ x + (0 + x | g)"), fitted, family = binomial)
out$version <- paste(R.version.string, "lme4", packageVersion("lme4"))
write_json(out, file.path(folder, "terms.json"), digits = NA, auto_unbox = TRUE, pretty = TRUE)
