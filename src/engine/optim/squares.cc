#include "engine/optim/squares.h"

#include <algorithm>
#include <tuple>

#include "kernels/optimizer.h"

namespace tandem {

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

SquareSums::SquareSums(const Exec& exec, int sums)
    : exec_(exec), count_(sums), sums_(square_sum_bytes(exec, sums), exec.device) {}

void SquareSums::add(int index, const Tensor& values) {
  add_squares(exec_, values, sums_, index);
}

std::vector<double> SquareSums::take() {
  std::vector<double> taken(static_cast<size_t>(count_));
  const auto bytes = int64_t(taken.size() * sizeof(double));
  const Tensor sums = sums_.view(DType::u8, {bytes});
  copy(exec_, sums, Tensor(taken.data(), DType::u8, {bytes}));
  clear(exec_, sums);
  return taken;
}

}  // namespace tandem
