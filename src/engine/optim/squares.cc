#include "engine/optim/squares.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "engine/optim/cuda/kernels.h"

namespace tandem {

double sum_of_squares(std::span<const float> values) {
  constexpr size_t kLanes = 16;
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (; i < values.size(); ++i) sum += double(values[i]) * double(values[i]);
  for (const double lane : lanes) sum += lane;
  return sum;
}

Squares sum_terms(std::vector<SquareTerm> terms) {
  std::ranges::stable_sort(terms, {}, [](const SquareTerm& term) {
    return std::tuple(term.group, term.bucket, term.begin);
  });
  Squares total, of_group;
  for (size_t i = 0; i < terms.size(); ++i) {
    (terms[i].replicated ? of_group.replicated : of_group.sharded) += terms[i].sum;
    if (i + 1 < terms.size() && terms[i + 1].group == terms[i].group) continue;
    total.sharded += of_group.sharded;
    total.replicated += of_group.replicated;
    of_group = {};
  }
  return total;
}

SquareSums::SquareSums(const Exec& exec, int sums) : exec_(exec), sums_(size_t(sums)) {
  if (exec.on_gpu()) on_gpu_ = Memory(gpu::square_sum_bytes(sums), exec.device);
}

void SquareSums::add(int index, const Tensor& values) {
  if (exec_.on_gpu()) return gpu::add_squares(exec_.stream, values, on_gpu_, index);
  sums_[size_t(index)] += sum_of_squares({values.as<const float>(), size_t(values.elements())});
}

std::vector<double> SquareSums::take() {
  if (exec_.on_gpu()) {
    const auto bytes = int64_t(sums_.size() * sizeof(double));
    const Tensor sums = on_gpu_.view(DType::u8, {bytes});
    copy(exec_, sums, Tensor(sums_.data(), DType::u8, {bytes}));
    clear(exec_, sums);
  }
  return std::exchange(sums_, std::vector<double>(sums_.size()));
}

}  // namespace tandem
