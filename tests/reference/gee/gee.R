# Rscript gee.R visits.csv gee.json: estimating equations by R's geepack.
library(geepack)
library(jsonlite)
args <- commandArgs(trailingOnly = TRUE)
d <- read.csv(args[1])
d <- d[order(d$patient, d$visit), ]
d$arm <- relevel(factor(d$arm), "new")
numbers <- function(fit) {
  list(coef = unname(coef(fit)), se = summary(fit)$coefficients[, 2], qic = unname(QIC(fit)[c("QIC", "QICu")]),
       alpha = unname(fit$geese$alpha), scale = unname(fit$geese$gamma))
}
fits <- function(formula, family) {
  lapply(c(independence = "independence", exchangeable = "exchangeable", ar1 = "ar1"), function(corstr) {
    call <- substitute(geeglm(f, family = g, data = d, id = patient, corstr = c, control = geese.control(
      epsilon = 1e-12, maxit = 200)), list(f = formula, g = family, c = corstr))
    numbers(eval(call))
  })
}
found <- list(
  score = fits(score ~ dose + arm + visit, quote(gaussian)),
  ill = fits(ill ~ dose + arm + visit, quote(binomial)),
  falls = fits(falls ~ dose + arm + visit, quote(poisson)),
  weighted = numbers(geeglm(falls ~ dose + arm + offset(shift), family = poisson, data = d, id = patient,
                            weights = weight, control = geese.control(epsilon = 1e-12, maxit = 200)))
)
found$version <- paste(R.version.string, "geepack", packageVersion("geepack"))
write_json(found, args[2], digits = NA, auto_unbox = TRUE, pretty = TRUE)
