#include "engine/parallel/sharded/trust_ratios.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "comm/flow_spans.h"
#include "observe/recorder.h"

namespace tandem {

double trust_ratio(double weight_squares, double direction_squares) {
  if (weight_squares == 0 || direction_squares == 0) return 1;
  return std::sqrt(weight_squares / direction_squares);
}

TrustRatios::TrustRatios(std::vector<Communicator*> axes, size_t num_tensors)
    : axes_(std::move(axes)), squares_(2 * num_tensors), ratios_(num_tensors) {}

void TrustRatios::add(size_t tensor, double weight_squares, double direction_squares) {
  squares_[tensor] += weight_squares;
  squares_[ratios_.size() + tensor] += direction_squares;
}

void TrustRatios::reduce() {
  std::vector<double> of_rank(squares_.size());
  for (Communicator* axis : axes_) {
    if (axis->size() == 1) continue;
    const ScopedWait span(Phase::dp_wait, "trust_ratios", -1, collective_call(*axis));
    const auto blobs = axis->exchange(std::as_bytes(std::span(squares_)), "trust ratios");
    std::ranges::fill(squares_, 0.0);
    for (const auto& blob : blobs) {
      std::memcpy(of_rank.data(), blob.data(), blob.size());
      for (size_t i = 0; i < squares_.size(); ++i) squares_[i] += of_rank[i];
    }
  }
  for (size_t i = 0; i < ratios_.size(); ++i) {
    ratios_[i] = trust_ratio(squares_[i], squares_[ratios_.size() + i]);
  }
  std::ranges::fill(squares_, 0.0);
}

}  // namespace tandem
