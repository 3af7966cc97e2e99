#include "train/step_exchange.h"

#include <algorithm>
#include <cstring>

#include "observe/recorder.h"

namespace tandem {
namespace {

template <typename Record>
std::vector<Record> exchange_records(Communicator& world, const Record& mine, const char* what) {
  std::vector<Record> all;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&mine, 1)), what)) {
    std::memcpy(&all.emplace_back(), blob.data(), sizeof(Record));
  }
  return all;
}

}  // namespace

StepSums exchange_sums(Communicator& world, const StepSums& mine) {
  if (world.size() == 1) return mine;
  const ScopedSpan span(SpanKind::wait, "gradient_norm");
  const std::vector<StepSums> all = exchange_records(world, mine, "step sums");
  StepSums total = all[0];
  for (size_t rank = 1; rank < all.size(); ++rank) {
    total.loss += all[rank].loss;
    total.squares += all[rank].squares;
  }
  return total;
}

void exchange_times(Communicator& world, StepMetrics& metrics) {
  struct Times {
    double gemm, compute, wait;
  };
  const Times mine{recorder().seconds(SpanKind::gemm), recorder().seconds(SpanKind::compute),
                   recorder().seconds(SpanKind::wait)};
  for (const Times& t : exchange_records(world, mine, "step times")) {
    metrics.gemm_ms = std::max(metrics.gemm_ms, t.gemm * 1e3);
    metrics.compute_ms = std::max(metrics.compute_ms, (t.gemm + t.compute) * 1e3);
    metrics.exposed_comm_ms = std::max(metrics.exposed_comm_ms, t.wait * 1e3);
  }
}

}  // namespace tandem
