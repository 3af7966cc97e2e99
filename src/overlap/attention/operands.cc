#include "overlap/attention/operands.h"

#include "core/random_buffer.h"

namespace tandem {

ContextOperands::ContextOperands(const ContextGrid& grid, int64_t window) : mask(window) {
  const ContextShape& s = grid.shape;
  const int64_t rows = grid.queries(grid.rank).count(), keys = grid.keys(grid.rank).count();
  const auto make = [&](DType dtype, int64_t r, int64_t columns) {
    memory_.push_back(random_buffer(dtype, r * columns, memory_.size()));
    return memory_.back().view(dtype, {r, columns});
  };
  for (Tensor* t : {&q, &out, &dout, &dq}) *t = make(s.dtype, s.batch * rows, grid.q_columns());
  for (Tensor* t : {&k, &v, &dk, &dv}) *t = make(s.dtype, s.batch * keys, grid.kv_columns());
  log_sums = make(DType::f32, s.batch * s.heads, rows);
}

}  // namespace tandem
