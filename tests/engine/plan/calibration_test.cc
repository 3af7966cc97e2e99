// A fit finds the factors that rows were made with, and stays physical where rows say nothing.
#include "engine/plan/fit/calibration.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "engine/plan/fit/prediction.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

RunRow make_row(double hidden, double tp, double pp, double gpus, double accumulation) {
  RunRow row;
  row.id = row.group = "made";
  row.model = "GPT";
  row.gpu = "H100";
  row.precision = "bf16";
  row.layers = 48;
  row.hidden = hidden;
  row.heads = row.kv_heads = hidden / 128;
  row.head_dim = 128;
  row.ffn = 4 * hidden;
  row.vocab = 50304;
  row.seq = 4096;
  row.gpus = gpus;
  row.tp = tp;
  row.pp = pp;
  row.vpp = pp > 1 ? 4 : 1;
  row.dp = gpus / tp / pp;
  row.grad_accum = accumulation;
  row.gbs = row.dp * accumulation;
  return row;
}

std::vector<RunRow> make_rows(const Factors& truth, double noise) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  std::vector<RunRow> rows;
  for (const double hidden : {2048., 4096., 8192., 12288.}) {
    for (const double tp : {1., 2., 8.}) {
      for (const double pp : {1., 4.}) {
        for (const double gpus : {64., 512.}) {
          for (const double accumulation : {4., 32.}) {
            rows.push_back(make_row(hidden, tp, pp, gpus, accumulation));
            const double step = step_time(work_of(rows.back(), gpu_of(rows.back())), truth).total;
            rows.back().step_s = step * std::exp(noise * normal(random));
          }
        }
      }
    }
  }
  return rows;
}

TEST(Calibration, FindsTheFactorsOfItsRows) {
  Factors truth = prior_means();
  truth[size_t(Term::gemm)] *= 1.25;
  truth[size_t(Term::tp)] *= 2;
  truth[size_t(Term::launch)] *= 2.5;
  const std::vector<RunRow> rows = make_rows(truth, .002);
  const Predictions same = predict_rows(rows, rows);
  EXPECT_LT(same.model_errors().mape, .8);
  std::vector<const RunRow*> predicted{&rows[0]};
  const Factors found =
      Calibration(rows, predicted).fit_of(rows[0]).factors(rows[0], gpu_of(rows[0]));
  for (const Term term : {Term::gemm, Term::tp, Term::launch})
    EXPECT_NEAR(found[size_t(term)] / truth[size_t(term)], 1, .12) << int(term);
}

TEST(Calibration, PredictsLayoutsThatItHasNotSeen) {
  Factors truth = prior_means();
  truth[size_t(Term::gemm)] *= 1.2;
  truth[size_t(Term::tp)] *= 1.6;
  const std::vector<RunRow> rows = make_rows(truth, .002);
  const Errors errors = leave_out(rows, "hidden", RowFilter("")).model_errors();
  EXPECT_EQ(errors.rows, rows.size());
  EXPECT_LT(errors.mape, 2);
  EXPECT_LT(errors.worst, 6);
}

TEST(Calibration, TermsWithoutDataStayAtTheirPriors) {
  Factors truth = prior_means();
  truth[size_t(Term::gemm)] *= 1.2;
  const std::vector<RunRow> rows = make_rows(truth, 0);
  std::vector<const RunRow*> predicted{&rows[0]};
  const Fit& fit = Calibration(rows, predicted).fit_of(rows[0]);
  const Factors found = fit.factors(rows[0], gpu_of(rows[0]));
  EXPECT_NEAR(found[size_t(Term::cp)], truth[size_t(Term::cp)], 1e-9);
  EXPECT_NEAR(found[size_t(Term::ep)], truth[size_t(Term::ep)], 1e-9);
  EXPECT_LT(fit.parameters, double(kTerms));
}

TEST(Calibration, DoesNotDependOnTheOrderOfRows) {
  std::vector<RunRow> rows = make_rows(prior_means(), .05);
  const Predictions first = predict_rows(rows, rows);
  std::vector<RunRow> reversed(rows.rbegin(), rows.rend());
  const Predictions second = predict_rows(reversed, rows);
  for (size_t i = 0; i < rows.size(); ++i)
    EXPECT_NEAR(first.rows[i].time.total / second.rows[i].time.total, 1, 1e-3);
}

TEST(Calibration, ClassesWithoutRowsTakeAWiderFit) {
  const std::vector<RunRow> rows = make_rows(prior_means(), 0);
  std::vector<RunRow> other{rows[5]};
  other[0].group = "another";
  const Predictions predicted = predict_rows(rows, other);
  EXPECT_NEAR(predicted.rows[0].time.total / *rows[5].step_s, 1, .01);
}

TEST(Calibration, NeedsARowToFit) {
  std::vector<RunRow> rows{make_row(2048, 1, 1, 8, 4)};  // without a step time
  EXPECT_THROW(predict_rows(rows, rows), InvalidArgument);
  rows[0].step_s = 1;
  rows[0].gpu = "Z80";
  EXPECT_THROW(predict_rows(rows, rows), InvalidArgument);
}

TEST(StepTime, MoreOfATermTakesLonger) {
  const RunRow row = make_row(8192, 8, 4, 512, 32);
  const StepWork work = work_of(row, gpu_of(row));
  const double base = step_time(work, prior_means()).total;
  for (const Term term : {Term::gemm, Term::gemm_bytes, Term::memory, Term::attention, Term::launch,
                          Term::tp, Term::pp, Term::bubble, Term::dp, Term::optimizer, Term::head,
                          Term::fixed, Term::jitter, Term::software}) {
    Factors more = prior_means();
    more[size_t(term)] *= 1.5;
    EXPECT_GT(step_time(work, more).total, base) << int(term);
  }
}

TEST(StepTime, IsTheSumOfItsShares) {
  const RunRow row = make_row(8192, 8, 4, 512, 32);
  const StepTime t = step_time(work_of(row, gpu_of(row)), prior_means());
  EXPECT_NEAR(t.compute + t.exposed_tp + t.exposed_cp + t.exposed_ep + t.exposed_pp + t.exposed_dp +
                  t.imbalance + t.bubble + t.optimizer + t.fixed + t.jitter,
              t.total, 1e-9 * t.total);
}

}  // namespace
}  // namespace tandem::plan
