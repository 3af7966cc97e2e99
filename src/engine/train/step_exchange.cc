#include "engine/train/step_exchange.h"

#include <algorithm>
#include <cstring>

#include "comm/exec.h"
#include "comm/flow_spans.h"
#include "engine/config/device_traits.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

/// `local` of all ranks, added along each axis in rank order. `name` and `phase`: of the wait.
template <typename Record>
Record sum_along(const WorldAxes& axes, const Record& local, const char* name, const char* what,
                 Phase phase = Phase::step_wait) {
  Record total = local;
  for (Communicator* axis : axes) {
    if (axis->size() == 1) continue;
    const ScopedWait span(phase, name, -1, collective_call(*axis));
    const Record of_rank = total;
    bool is_first = true;
    for (const auto& blob : axis->exchange(std::as_bytes(std::span(&of_rank, 1)), what)) {
      Record other;
      std::memcpy(&other, blob.data(), sizeof(Record));
      if (std::exchange(is_first, false)) {
        total = other;
      } else {
        total += other;
      }
    }
  }
  return total;
}

}  // namespace

StepSums& StepSums::operator+=(const StepSums& other) {
  loss += other.loss;
  squares += other.squares;
  text += other.text;
  stop = stop || other.stop;
  save = save || other.save;
  running = running | other.running;
  failed = failed || other.failed;
  checks += other.checks;
  updates += other.updates;
  targets += other.targets;
  is_nonfinite = is_nonfinite || other.is_nonfinite;
  is_spike = is_spike || other.is_spike;
  ends_updates = ends_updates || other.ends_updates;
  return *this;
}

StepSums exchange_learner_sums(const ParallelGroups& groups, const StepSums& local) {
  StepSums sums = sum_along(groups.learner_axes(), local, "gradient_norm", "step sums");
  sums.learner_squares = sums.squares;
  return sums;
}

StepSums exchange_sums(const ParallelGroups& groups, const StepSums& local) {
  const StepSums sums = exchange_learner_sums(groups, local);
  if (!groups.sync()) return sums;
  StepSums all = sum_along({groups.sync()}, sums, "gradient_norm", "step sums", Phase::sync_wait);
  all.learner_squares = sums.learner_squares;
  return all;
}

StepTimes StepTimes::of_rank(const ShardedOptimizer::Sent& sent,
                             const std::optional<Pipeline::Times>& passes,
                             const StepRecord& record) {
  const PhaseTimes phases = recorder().phase_times();
  const auto ms = [](SpanKind kind) { return recorder().seconds(kind) * 1e3; };
  StepTimes times{.slowest = {ms(SpanKind::gemm), ms(SpanKind::gemm) + ms(SpanKind::compute),
                              ms(SpanKind::wait), ms(SpanKind::recompute)},
                  .data_wait = ms(SpanKind::data),
                  .sent = sent,
                  .checkpoint_ms = record.checkpoint_ms.value_or(0),
                  .memory_bytes = record.memory_bytes,
                  .tp_bytes = record.tp_bytes,
                  .expert_bytes = record.expert_bytes,
                  .cp_bytes = record.cp_bytes,
                  .sync_bytes = record.sync_bytes,
                  .waits = {phases[size_t(Phase::tp_wait)], phases[size_t(Phase::ep_wait)],
                            phases[size_t(Phase::dp_wait)], phases[size_t(Phase::pp_wait)],
                            phases[size_t(Phase::cp_wait)], phases[size_t(Phase::sync_wait)]},
                  .state_bytes = record.state_bytes_per_parameter};
  if (!passes) return times;
  times.has_passes = true;
  times.busy_s = passes->passes_s - passes->waited_s;
  times.passes_s = passes->passes_s;
  times.stage_bytes = passes->sent_bytes;
  return times;
}

StepTimes& StepTimes::operator+=(const StepTimes& other) {
  if (slowest.compute < other.slowest.compute) slowest = other.slowest;
  data_wait = std::max(data_wait, other.data_wait);
  sent = sent + other.sent;
  busy_s += other.busy_s;
  passes_s = std::max(passes_s, other.passes_s);
  checkpoint_ms = std::max(checkpoint_ms, other.checkpoint_ms);
  memory_bytes = std::max(memory_bytes, other.memory_bytes);
  stage_bytes += other.stage_bytes;
  tp_bytes += other.tp_bytes;
  expert_bytes += other.expert_bytes;
  cp_bytes += other.cp_bytes;
  sync_bytes += other.sync_bytes;
  waits = waits + other.waits;
  state_bytes = std::max(state_bytes, other.state_bytes);
  return *this;
}

void StepTimes::write(int ranks, StepRecord& record) const {
  if (record.checkpoint_ms) record.checkpoint_ms = checkpoint_ms;
  record.memory_bytes = memory_bytes;
  record.gemm_ms = slowest.gemm;
  record.compute_ms = slowest.compute;
  record.exposed_comm_ms = slowest.wait;
  record.data_wait_ms = data_wait;
  record.recompute_ms = slowest.recompute;
  record.gradient_bytes = sent.gradients;
  record.uncompressed_gradient_bytes = sent.uncompressed_gradients;
  record.weight_bytes = sent.weights;
  record.tp_bytes = tp_bytes;
  record.expert_bytes = expert_bytes;
  record.cp_bytes = cp_bytes;
  record.sync_bytes = sync_bytes;
  record.state_bytes_per_parameter = state_bytes;
  record.exposed_ms = waits / ranks;
  record.sent_bytes =
      AxisMeans{double(tp_bytes),    double(expert_bytes), double(sent.gradients + sent.weights),
                double(stage_bytes), double(cp_bytes),     double(sync_bytes)} /
      ranks;
  if (!has_passes) return;
  record.stage_bytes = stage_bytes;
  if (passes_s == 0) return;  // not timed
  record.bubble = 1 - busy_s / (ranks * passes_s);
}

StepTimes exchange_times(const WorldAxes& axes, const StepTimes& local) {
  return sum_along(axes, local, "step_times", "step times");
}

void exchange_step(const WorldAxes& axes, const ShardedOptimizer::Sent& sent,
                   const std::optional<Pipeline::Times>& passes, StepRecord& record) {
  int ranks = 1;
  for (const Communicator* axis : axes) ranks *= axis->size();
  exchange_times(axes, StepTimes::of_rank(sent, passes, record)).write(ranks, record);
  record.counts_layer_bytes = device_traits(make_exec(*axes.front())).is_host;
}

}  // namespace tandem
