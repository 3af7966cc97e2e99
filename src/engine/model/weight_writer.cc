#include "engine/model/weight_writer.h"

#include <algorithm>

#include "core/cpu/scalar.h"
#include "core/cpu/tasks.h"

namespace tandem {
namespace {

/// Bytes that a thread makes at once: they stay in its caches until they are checked and stored.
constexpr int64_t kBlockBytes = int64_t{256} << 10;
/// Bytes of a copy to a GPU, and the number of those in flight.
constexpr int64_t kCopyBytes = int64_t{8} << 20;
constexpr int kUploads = 3;

int64_t rows_in(int64_t bytes, const LocalShard& shard, DType dtype) {
  return std::max<int64_t>(1, bytes / (shard.columns * int64_t(size_of(dtype))));
}

/// Range of rows in views of the shard's local_range.
FlatRange range_of_rows(const LocalShard& shard, int64_t first_row, int64_t rows) {
  return {first_row * shard.row_stride, (rows - 1) * shard.row_stride + shard.columns};
}

bool is_contiguous(const LocalShard& shard, int64_t rows) {
  return rows == 1 || shard.row_stride == shard.columns;
}

/// View, [rows, columns], of the only weights in `to`, if they have this dtype.
Tensor in_place(const WeightViews& to, DType dtype, int64_t rows, int64_t columns) {
  if (!to.exact_ranges.empty() || (to.f32.data() && to.working.data())) return {};
  const Tensor& flat = to.f32.data() ? to.f32 : to.working;
  if (flat.dtype() != dtype) return {};
  return Tensor(flat.data(), dtype, {rows, columns});
}

/// Rounds f32 to bf16.
void round_to_bf16(const Tensor& values, const Tensor& to) {
  constexpr int64_t kMinElements = 1 << 15;
  cpu::parallel_ranges(values.elements(), kMinElements, [&](int64_t begin, int64_t end) {
    const auto* from = values.as<const float>();
    auto* rounded = to.as<BFloat16>();
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) rounded[i] = cpu::from_f32<BFloat16>(from[i]);
  });
}

/// make(first_row, out) for blocks of `rows`, in parallel.
void make_rows(const LocalShard& shard, int64_t first_row, const Tensor& rows,
               const MakeRows& make) {
  const int64_t count = rows.dim(0), block = rows_in(kBlockBytes, shard, rows.dtype());
  cpu::parallel_tasks((count + block - 1) / block, [&](int64_t i) {
    const int64_t first = i * block;
    make(first_row + first, rows.rows(first, std::min(block, count - first)));
  });
}

}  // namespace

WeightWriter::WeightWriter(const Exec& exec, bool pins)
    : exec_(exec), is_host_(exec.device == Device()) {
  if (is_host_ || !pins) return;
  for (int i = 0; i < kUploads; ++i) uploads_.emplace_back(exec, size_t(kCopyBytes));
}

void WeightWriter::write(const LocalShard& shard, const WeightViews& to, DType dtype,
                         const MakeRows& make) {
  if (shard.rows == 0 || shard.columns == 0 || to.bytes() == 0) return;
  if (dtype != DType::bf16 || to.f32.data() || !to.exact_ranges.empty()) dtype = DType::f32;
  if (!is_host_) {
    const int64_t max_rows = std::min(shard.rows, rows_in(kCopyBytes, shard, dtype));
    rows_.resize(size_t(max_rows * shard.columns) * size_of(dtype));
    for (int64_t first = 0; first < shard.rows; first += max_rows) {
      const Tensor rows(rows_.data(), dtype,
                        {std::min(max_rows, shard.rows - first), shard.columns});
      make_rows(shard, first, rows, make);
      store(shard, first, rows, to);
    }
    return;
  }
  const int64_t block = rows_in(kBlockBytes, shard, dtype);
  cpu::parallel_tasks((shard.rows + block - 1) / block, [&](int64_t i) {
    const int64_t first = i * block, count = std::min(block, shard.rows - first);
    if (is_contiguous(shard, count)) {
      const WeightViews block_views = to.narrow(range_of_rows(shard, first, count));
      const Tensor made_there = in_place(block_views, dtype, count, shard.columns);
      if (made_there.data()) return make(first, made_there);
    }
    std::vector<std::byte> memory(size_t(count * shard.columns) * size_of(dtype));
    const Tensor rows(memory.data(), dtype, {count, shard.columns});
    make(first, rows);
    store(shard, first, rows, to);
  });
}

void WeightWriter::store(const LocalShard& shard, int64_t first_row, const Tensor& rows,
                         const WeightViews& to) {
  const int64_t count = rows.dim(0);
  const int64_t at_once = is_contiguous(shard, count) ? count : 1;
  for (int64_t row = 0; row < count; row += at_once) {
    const Tensor some = rows.rows(row, at_once);
    store(Tensor(some.data(), some.dtype(), {some.elements()}),
          to.narrow(range_of_rows(shard, first_row + row, at_once)));
  }
}

void WeightWriter::store(const Tensor& values, const WeightViews& to) {
  if (to.f32.data()) upload(values, to.f32);
  if (to.working.data() && values.dtype() == to.working.dtype()) {
    upload(values, to.working);
  } else if (to.working.data() && is_host_) {
    round_to_bf16(values, to.working);
  } else if (to.working.data()) {
    rounded_.resize(to.working.bytes());
    const Tensor rounded(rounded_.data(), to.working.dtype(), {values.elements()});
    round_to_bf16(values, rounded);
    upload(rounded, to.working);
  }
  for (const ExactRange& slice : to.exact_ranges) {
    upload(values.narrow(0, slice.begin, slice.count),
           to.exact.narrow(0, slice.position, slice.count));
  }
}

void WeightWriter::upload(const Tensor& from, const Tensor& to) {
  if (uploads_.empty()) return copy(exec_, from, to);
  const int64_t max_count = kCopyBytes / int64_t(size_of(from.dtype())), elements = from.elements();
  for (int64_t begin = 0; begin < elements; begin += max_count) {
    const int64_t count = std::min(max_count, elements - begin);
    uploads_[next_++ % uploads_.size()].run(exec_, from.narrow(0, begin, count),
                                            to.narrow(0, begin, count));
  }
}

}  // namespace tandem
