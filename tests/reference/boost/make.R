# Reference fits by FDboost 1.1-1 (mboost 2.9-13). Run in a folder with the tables that
# tests/models/boost/curve_cases.py writes (python curve_cases.py FOLDER).
suppressPackageStartupMessages({library(FDboost); library(jsonlite)})
rd <- function(f) unname(as.matrix(read.csv(f, header = FALSE)))
zg <- rd("zg.csv"); Y <- rd("y.csv"); Yn <- rd("y_na.csv"); x3 <- rd("x3.csv")
d <- list(Y = Y, x1 = rd("x1.csv"), x2 = rd("x2.csv"), x3 = rd("x3.csv"), z = zg[, 1], g = factor(zg[, 2]),
          s = seq(0, 1, l = 40), t = seq(0, 1, l = 25))
out <- function(f) list(xselect = f$xselect(), risk = tail(f$risk(), 1), fitted = as.numeric(f$fitted()),
                        lambda = unname(unlist(lapply(f$basemodel, function(b) as.numeric(extract(b, "lambda"))))))
A <- FDboost(Y ~ 1 + bsignal(x1, s, knots = 8, df = 4) + bsignal(x2, s, knots = 8, df = 4) +
               bsignal(x3, s, knots = 8, df = 4) + bolsc(z, df = 1) + bbsc(z, df = 4, knots = 10) + bolsc(g, df = 2),
             timeformula = ~bbs(t, knots = 10, df = 3), data = d, offset = colMeans(Y),
             control = boost_control(mstop = 150, nu = .1))
e <- list(Y = Yn, x2 = d$x2, xc = x3[, round(seq(1, 40, l = 25))], z = d$z, s = d$s, t = d$t, u = d$t)
B <- FDboost(Y ~ 1 + bsignal(x2, s, knots = 8, df = 4) + bconcurrent(xc, u, t, knots = 10, df = 4) + bolsc(z, df = 2),
             timeformula = ~bbs(t, knots = 10, df = 3), data = e, offset = colMeans(Y),
             control = boost_control(mstop = 80, nu = .1))
C <- FDboost(Y ~ 1 + bhist(x1, s, t, knots = 6, df = 10) + bhist(x2, s, t, knots = 6, df = 10),
             timeformula = ~bbs(t, knots = 10, df = 10), data = d[c("Y", "x1", "x2", "s", "t")], offset = colMeans(Y),
             control = boost_control(mstop = 60, nu = .1))
write(toJSON(list(A = out(A), B = out(B), C = out(C)), digits = 15, auto_unbox = TRUE), "fdboost.json")
