# Lasso with weights and an offset, by glmnet 4.1-6 (R 4.2.2): Rscript weights.R > weights.json
library(glmnet)
library(jsonlite)
n <- 200
p <- 9
i <- matrix(0:(n - 1), n, p)
j <- matrix(0:(p - 1), n, p, byrow = TRUE)
X <- round(3 * sin(1 + 37 * i + 101 * j + 0.7 * i * j), 3) + 0.5 * j
rows <- 0:(n - 1)
w <- 1 + rows %% 4
offset <- round(sin(3 + 11 * rows^2), 3)
eta <- 0.3 * (X[, 1] - 0.5 * (X[, 5] - 2)) + offset
noise <- round(cos(5 + 17 * rows^2), 3)
response <- list(gaussian = 4 * eta + 3 * noise, binomial = 1 * (eta + 1.5 * noise > 0), poisson = floor(exp(0.6 * eta + noise)))
lambdas <- list(gaussian = c(2, 0.5, 0.1), binomial = c(0.1, 0.05, 0.01), poisson = c(0.5, 0.2, 0.05))
fit <- function(family, ...) {
  path <- glmnet(X, response[[family]], family = family, lambda = lambdas[[family]], thresh = 1e-16, maxit = 1e7, ...)
  list(lambdas = path$lambda, params = t(rbind(path$a0, as.matrix(path$beta))))
}
cases <- function(family) {
  list(
    weights = fit(family, weights = w),
    offset = fit(family, offset = offset),
    both = fit(family, weights = w, offset = offset)
  )
}
cat(toJSON(sapply(names(response), cases, simplify = FALSE), digits = 14, pretty = FALSE), "\n", sep = "")
