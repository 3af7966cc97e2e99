// Writes shards of parameters to a rank's weights in blocks of rows, so that the memory next to the
// weights is bounded: in host memory in place where it has the values' dtype, by this thread's
// kernel threads; to a GPU by copies that run while the next rows are made.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "core/exec.h"
#include "engine/model/parameter.h"
#include "engine/model/weights.h"

namespace tandem {

/// Writes the values of a parameter's shard to `to`, views of its local_range.
using SetParameter = std::function<void(const Parameter& p, const WeightViews& to)>;
/// Makes rows of a shard from `first_row` on: `out`, contiguous [rows, columns] in host memory.
/// Several threads call it for different rows.
using MakeRows = std::function<void(int64_t first_row, const Tensor& out)>;

class WeightWriter {
 public:
  /// `pins`: copies to a GPU are enqueued from pinned memory of the calling rank's share of it, and
  /// this thread must be the rank's; else each is waited for.
  explicit WeightWriter(const Exec& exec, bool pins = true);
  /// `to`: views of the local_range that the shard is of; without elements nothing is made. `out`
  /// of `make` is f32, or bf16 if `dtype` is and `to` has no weights in f32. The copies to a GPU
  /// precede what exec's stream is given later. Throws the error of the first row that has one.
  void write(const LocalShard& shard, const WeightViews& to, DType dtype, const MakeRows& make);

 private:
  /// Consecutive rows of a shard, in host memory.
  void store(const LocalShard& shard, int64_t first_row, const Tensor& rows, const WeightViews& to);
  void store(const Tensor& values, const WeightViews& to);
  void upload(const Tensor& from, const Tensor& to);

  Exec exec_;
  bool is_host_;
  std::vector<Upload> uploads_;  // in turn; none for host memory, or without pinned memory
  size_t next_ = 0;
  std::vector<std::byte> rows_, rounded_;  // for GPUs
};

}  // namespace tandem
