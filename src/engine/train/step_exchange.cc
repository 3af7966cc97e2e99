#include "engine/train/step_exchange.h"

#include <algorithm>
#include <cstring>

#include "comm/exec.h"
#include "comm/flow_spans.h"
#include "engine/config/device_traits.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

/// `local` of all ranks, combined along each axis in rank order: combine(total, other). `name` and
/// `phase`: of the wait.
template <typename Record, typename Combine>
Record combine_along(const WorldAxes& axes, const Record& local, const char* name, const char* what,
                     const Combine& combine, Phase phase = Phase::step_wait) {
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
        combine(total, other);
      }
    }
  }
  return total;
}

}  // namespace

StepSums exchange_sums(const ParallelGroups& groups, const StepSums& local) {
  const auto combine = [](StepSums& total, const StepSums& other) {
    total.loss += other.loss;
    total.squares += other.squares;
    total.text += other.text;
    total.stop = total.stop || other.stop;
    total.save = total.save || other.save;
    total.running = total.running | other.running;
    total.failed = total.failed || other.failed;
    total.checks += other.checks;
  };
  StepSums sums =
      combine_along(groups.learner_axes(), local, "gradient_norm", "step sums", combine);
  sums.learner_squares = sums.squares;
  if (!groups.sync()) return sums;
  StepSums all =
      combine_along({groups.sync()}, sums, "gradient_norm", "step sums", combine, Phase::sync_wait);
  all.learner_squares = sums.learner_squares;
  return all;
}

void exchange_step(const WorldAxes& axes, const ShardedOptimizer::Sent& sent,
                   const std::optional<Pipeline::Times>& passes, StepRecord& record) {
  struct Times {
    struct {
      double gemm, compute, wait, recompute;
    } slowest;         // of the rank that computes longest
    double data_wait;  // the longest
    ShardedOptimizer::Sent sent;
    double busy_s, passes_s;  // the ranks' sum, the longest
    double checkpoint_ms;
    int64_t memory_bytes;
    uint64_t stage_bytes, tp_bytes, expert_bytes, sync_bytes;
    AxisMeans waits;  // the ranks' sums
    double state_bytes;
  };
  const PhaseTimes phases = recorder().phase_times();
  const auto ms = [](SpanKind kind) { return recorder().seconds(kind) * 1e3; };
  const Times local{{ms(SpanKind::gemm), ms(SpanKind::gemm) + ms(SpanKind::compute),
                     ms(SpanKind::wait), ms(SpanKind::recompute)},
                    ms(SpanKind::data),
                    sent,
                    passes ? passes->passes_s - passes->waited_s : 0,
                    passes ? passes->passes_s : 0,
                    record.checkpoint_ms.value_or(0),
                    record.memory_bytes,
                    passes ? passes->sent_bytes : 0,
                    record.tp_bytes,
                    record.expert_bytes,
                    record.sync_bytes,
                    {phases[size_t(Phase::tp_wait)], phases[size_t(Phase::ep_wait)],
                     phases[size_t(Phase::dp_wait)], phases[size_t(Phase::pp_wait)],
                     phases[size_t(Phase::sync_wait)]},
                    record.state_bytes_per_parameter};
  const auto combine = [](Times& total, const Times& other) {
    if (total.slowest.compute < other.slowest.compute) total.slowest = other.slowest;
    total.data_wait = std::max(total.data_wait, other.data_wait);
    total.sent = total.sent + other.sent;
    total.busy_s += other.busy_s;
    total.passes_s = std::max(total.passes_s, other.passes_s);
    total.checkpoint_ms = std::max(total.checkpoint_ms, other.checkpoint_ms);
    total.memory_bytes = std::max(total.memory_bytes, other.memory_bytes);
    total.stage_bytes += other.stage_bytes;
    total.tp_bytes += other.tp_bytes;
    total.expert_bytes += other.expert_bytes;
    total.sync_bytes += other.sync_bytes;
    total.waits = total.waits + other.waits;
    total.state_bytes = std::max(total.state_bytes, other.state_bytes);
  };
  const Times all = combine_along(axes, local, "step_times", "step times", combine);
  if (record.checkpoint_ms) record.checkpoint_ms = all.checkpoint_ms;
  record.memory_bytes = all.memory_bytes;
  record.gemm_ms = all.slowest.gemm;
  record.compute_ms = all.slowest.compute;
  record.exposed_comm_ms = all.slowest.wait;
  record.data_wait_ms = all.data_wait;
  record.recompute_ms = all.slowest.recompute;
  record.gradient_bytes = all.sent.gradients;
  record.uncompressed_gradient_bytes = all.sent.uncompressed_gradients;
  record.weight_bytes = all.sent.weights;
  record.tp_bytes = all.tp_bytes;
  record.expert_bytes = all.expert_bytes;
  record.sync_bytes = all.sync_bytes;
  record.state_bytes_per_parameter = all.state_bytes;
  int ranks = 1;
  for (const Communicator* axis : axes) ranks *= axis->size();
  record.exposed_ms = all.waits / ranks;
  record.sent_bytes = AxisMeans{double(all.tp_bytes), double(all.expert_bytes),
                                double(all.sent.gradients + all.sent.weights),
                                double(all.stage_bytes), double(all.sync_bytes)} /
                      ranks;
  record.counts_layer_bytes = device_traits(make_exec(*axes.front())).is_host;
  if (!passes) return;
  record.stage_bytes = all.stage_bytes;
  if (all.passes_s == 0) return;  // not timed
  record.bubble = 1 - all.busy_s / (ranks * all.passes_s);
}

}  // namespace tandem
