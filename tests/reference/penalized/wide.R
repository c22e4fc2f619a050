# Lasso with more columns than rows, by glmnet 4.1-6 (R 4.2.2): Rscript wide.R > wide.json
library(glmnet)
library(jsonlite)
n <- 40
p <- 60
i <- matrix(0:(n - 1), n, p)
j <- matrix(0:(p - 1), n, p, byrow = TRUE)
X <- round(3 * sin(1 + 37 * i + 101 * j + 0.7 * i * j), 3)
noise <- round(2 * cos(5 + 17 * (0:(n - 1))^2), 3)
y <- 2 * X[, 1] - 1.5 * X[, 32] + X[, 3] + noise
response <- list(gaussian = y, binomial = 1 * (y > 0), poisson = floor(exp(0.2 * y)))
lambdas <- list(gaussian = c(2, 1, 0.5), binomial = c(0.2, 0.1, 0.05), poisson = c(1, 0.5, 0.2))
fit <- function(family) {
  path <- glmnet(X, response[[family]], family = family, lambda = lambdas[[family]], thresh = 1e-16, maxit = 1e7)
  list(lambdas = path$lambda, params = t(rbind(path$a0, as.matrix(path$beta))))
}
cat(toJSON(sapply(names(response), fit, simplify = FALSE), digits = 14, pretty = FALSE), "\n", sep = "")
