#include "fit/fit.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "fit/problem/vectors.h"

namespace tandem::fit {
namespace {

/// Results of one rank, which all ranks reduce in rank order.
struct RankMeasure {
  double distance = 0;
  double objective = -std::numeric_limits<double>::infinity();
  int64_t bytes_sent = 0;
  int64_t is_finished = 0;
};

RankMeasure reduce_over_ranks(Communicator& comm, const RankMeasure& local) {
  std::vector<RankMeasure> all(size_t(comm.size()));
  const auto bytes = [](std::span<const RankMeasure> rows) {
    return Tensor(rows.data(), DType::u8, {int64_t(rows.size()), sizeof(RankMeasure)});
  };
  const Tensor out(all.data(), DType::u8, {comm.size(), int64_t(sizeof(RankMeasure))});
  all_gather(comm, bytes({&local, 1}), out);
  RankMeasure total;
  for (const RankMeasure& rank : all) {
    total.distance = max_or_nan(total.distance, rank.distance);
    total.objective = max_or_nan(total.objective, rank.objective);
    total.bytes_sent += rank.bytes_sent;
    total.is_finished |= rank.is_finished;
  }
  return total;
}

bool is_recorded(const FitRun& run, int64_t round) {
  constexpr int64_t kShare = 100;
  return run.history.empty() ||
         round >= run.history.back().rounds + std::max<int64_t>(1, round / kShare);
}

/// A method's rounds on one rank, and what they have cost so far.
class Runner {
 public:
  Runner(Communicator& comm, const Problem& problem, const MethodRow& row,
         const FitOptions& options)
      : comm_(comm),
        problem_(problem),
        channel_(comm, problem.clients()),
        method_(row.make({problem, options, channel_})) {}

  void run_round() {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    const FloatCount floats = method_->run_round(++point_.rounds);
    point_.seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    point_.floats.up += floats.up;
    point_.floats.down += floats.down;
  }

  /// Collective. The objective takes a pass over the data: it is 0 unless asked for.
  FitPoint measure(bool with_objective) {
    RankMeasure local{.bytes_sent = channel_.bytes_sent(), .is_finished = method_->is_finished()};
    for (const auto answer : method_->answers()) {
      const double distance = relative_distance(answer, method_->target());
      local.distance = max_or_nan(local.distance, distance);
      if (with_objective) local.objective = max_or_nan(local.objective, problem_.value(answer));
    }
    const RankMeasure all = reduce_over_ranks(comm_, local);
    is_finished_ = all.is_finished != 0;
    point_.distance = all.distance;
    point_.bytes_sent = all.bytes_sent;
    point_.objective = with_objective ? all.objective : 0;
    return point_;
  }

  bool is_finished() const { return is_finished_; }
  const Method& method() const { return *method_; }

 private:
  Communicator& comm_;
  const Problem& problem_;
  Channel channel_;
  const std::unique_ptr<Method> method_;
  FitPoint point_;
  bool is_finished_ = false;
};

}  // namespace

FitRun run_method(Communicator& comm, const Problem& problem, const MethodRow& row,
                  const FitOptions& options, const std::function<void(const FitPoint&)>& report) {
  if (options.async && row.run_async) {
    Channel channel(comm, problem.clients());
    return row.run_async({problem, options, channel}, report);
  }
  Runner runner(comm, problem, row, options);
  FitRun run;
  run.bias = relative_distance(runner.method().target(), problem.optimum());
  run.settings = runner.method().settings();
  for (bool continues = true; continues;) {
    const int64_t round = run.last.rounds + !run.history.empty();
    if (round > 0) runner.run_round();
    const bool records = is_recorded(run, round);
    run.last = runner.measure(records);
    run.reached_tol = run.last.distance <= options.tol;
    continues = !run.reached_tol && !runner.is_finished() && round < options.max_rounds &&
                run.last.distance < kDiverged;  // false for NaN
    if (!continues && !records) run.last = runner.measure(true);
    if (records || !continues) run.history.push_back(run.last);
    if (report && comm.rank() == 0) report(run.last);
  }
  const auto answers = runner.method().answers();
  if (!answers.empty() && !runner.method().moves_answers())
    run.answer.assign(answers[0].begin(), answers[0].end());
  return run;
}

}  // namespace tandem::fit
