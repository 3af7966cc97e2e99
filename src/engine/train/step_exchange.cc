#include "engine/train/step_exchange.h"

#include <algorithm>
#include <cstring>

#include "observe/recorder.h"

namespace tandem {
namespace {

template <typename Record>
std::vector<Record> exchange_records(Communicator& world, const Record& local, const char* what) {
  std::vector<Record> all;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&local, 1)), what)) {
    std::memcpy(&all.emplace_back(), blob.data(), sizeof(Record));
  }
  return all;
}

}  // namespace

StepSums exchange_sums(Communicator& world, const StepSums& local) {
  if (world.size() == 1) return local;
  const ScopedSpan span(SpanKind::wait, "gradient_norm");
  const std::vector<StepSums> all = exchange_records(world, local, "step sums");
  StepSums total = all[0];
  for (size_t rank = 1; rank < all.size(); ++rank) {
    total.loss += all[rank].loss;
    total.squares += all[rank].squares;
    total.stop = total.stop || all[rank].stop;
    total.save = total.save || all[rank].save;
    total.failed = total.failed || all[rank].failed;
  }
  return total;
}

void exchange_step(Communicator& world, const DataParallel::Sent& sent, StepMetrics& metrics) {
  struct Times {
    double gemm, compute, wait;
    DataParallel::Sent sent;
  };
  const auto ms = [](SpanKind kind) { return recorder().seconds(kind) * 1e3; };
  const Times local{ms(SpanKind::gemm), ms(SpanKind::gemm) + ms(SpanKind::compute),
                    ms(SpanKind::wait), sent};
  const std::vector<Times> all = exchange_records(world, local, "step times");
  const Times& slowest = *std::max_element(
      all.begin(), all.end(), [](const Times& a, const Times& b) { return a.compute < b.compute; });
  metrics.gemm_ms = slowest.gemm;
  metrics.compute_ms = slowest.compute;
  metrics.exposed_comm_ms = slowest.wait;
  for (const Times& times : all) {
    metrics.gradient_bytes += times.sent.gradients;
    metrics.plain_gradient_bytes += times.sent.plain;
    metrics.weight_bytes += times.sent.weights;
  }
}

}  // namespace tandem
