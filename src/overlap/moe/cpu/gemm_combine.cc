#include "overlap/moe/cpu/gemm_combine.h"

#include <algorithm>
#include <cstring>

#include "core/cpu/parallel.h"
#include "observe/recorder.h"

namespace tandem {

using namespace schedule;

namespace {

size_t whole_row_bytes(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

}  // namespace

MoeGemmCombineCpu::MoeGemmCombineCpu(Communicator& comm, const MoeRankCoords& coords,
                                     const Wire& wire)
    : coords_(coords),
      wire_(wire),
      message_bytes_(whole_row_bytes(max_message_bytes())),
      rows_bytes_(std::max(size_t(coords.shape.tokens) * coords.row_bytes, message_bytes_)),
      source_bytes_(whole_row_bytes(rows_bytes_ + size_t(coords.shape.tokens) *
                                                      size_t(coords.shape.top_k) * sizeof(float))),
      workspace_(comm, "moe_gemm_combine", size_t(coords.world) * source_bytes_,
                 size_t(coords.world) * (source_bytes_ + message_bytes_),
                 coords.world * (1 + kMaxChunks)),
      decoded_begin_(size_t(coords.world)) {}

Range MoeGemmCombineCpu::columns_of(const OverlapOptions& plan, int group) const {
  return moe_columns(coords_.shape.hidden, plan.chunks, group,
                     plan.wire.is_none() ? kMoeColumns : kWireBlock);
}
RowMessages MoeGemmCombineCpu::messages_of(const Range& columns) const {
  return RowMessages(wire_, coords_.shape.dtype, columns.count);
}
size_t MoeGemmCombineCpu::messages_before(const OverlapOptions& plan, int64_t rows,
                                          int group) const {
  size_t bytes = 0;
  for (int i = 0; i < group; ++i) bytes += messages_of(columns_of(plan, i)).bytes(rows);
  return bytes;
}
size_t MoeGemmCombineCpu::max_message_bytes() const {
  if (wire_.is_none()) return 0;
  size_t maximum =
      messages_of({0, coords_.shape.hidden}).max_bytes(coords_.shape.tokens, kMaxChunks);
  for (int chunks = 1; chunks <= kMaxChunks; ++chunks) {
    maximum = std::max(maximum, messages_before({Strategy::overlapped, chunks, wire_},
                                                coords_.shape.tokens, chunks));
  }
  return maximum;
}

size_t MoeGemmCombineCpu::offset_in_sums(int64_t rows, Range columns) const {
  return size_t(rows * columns.begin) * size_of(coords_.shape.dtype);
}
size_t MoeGemmCombineCpu::offset(int of, int64_t rows, Range columns) const {
  return size_t(of) * source_bytes_ + offset_in_sums(rows, columns);
}
size_t MoeGemmCombineCpu::values_offset(int of) const {
  return size_t(of) * source_bytes_ + rows_bytes_;
}

/// Sends the values of every row received from a rank, by k: 0 for experts that are not local.
void MoeGemmCombineCpu::send_values(const Call& call) {
  const auto k = size_t(coords_.shape.top_k);
  for (int step = 0; step < coords_.world; ++step) {
    const int to = moe_target(coords_.rank, coords_.world, step);
    const int64_t rows = call.rows.arrived(to);
    auto* const values = reinterpret_cast<float*>(workspace_.scratch() + values_offset(to));
    std::fill_n(values, size_t(rows) * k, 0.0f);
    for (int64_t row = 0; row < rows; ++row) {
      for (const MoeUse& use : call.rows.uses(to, row)) {
        values[size_t(row) * k + size_t(use.k)] = call.slot_values[size_t(use.slot)];
      }
    }
    if (step == 0) continue;
    workspace_.put(to, values_offset(coords_.rank), values, size_t(rows) * k * sizeof(float),
                   values_signal(coords_.rank));
  }
}

void MoeGemmCombineCpu::take_values(const Call& call) {
  for (int step = 1; step < coords_.world; ++step) {
    const int source = moe_source(coords_.rank, coords_.world, step);
    workspace_.await(values_signal(source), source, -1);
  }
  const auto k = size_t(coords_.shape.top_k);
  for (int64_t row = 0; row < call.rows.local_rows(); ++row) {
    float* const to = call.row_values.as<float>() + size_t(row) * k;
    std::fill_n(to, k, 0.0f);
    for (const auto& [rank, at] : call.rows.copies(row)) {
      const std::byte* memory = rank == coords_.rank ? workspace_.scratch() : workspace_.shared();
      const auto* from =
          reinterpret_cast<const float*>(memory + values_offset(rank)) + size_t(at) * k;
      for (size_t i = 0; i < k; ++i) to[i] += from[i];
    }
  }
}

void MoeGemmCombineCpu::multiply_groups(const Call& call, Range groups, Range columns) {
  const Tensor y = products_.of(DType::f32, call.rows.slots(), columns.count);
  for (int expert = 0; expert < int(coords_.experts.count); ++expert) {
    const Range slots = call.rows.slots_of(expert, groups);
    if (slots.count > 0) call.product(expert, slots, columns, y.rows(slots.begin, slots.count));
  }
}

void MoeGemmCombineCpu::multiply(const OverlapOptions& plan, const Call& call, RowsFrom from,
                                 int group) {
  const ScopedLabel label("moe_gemm_combine", -1);
  const Range all{0, coords_.shape.hidden};
  switch (from) {
    case RowsFrom::all:
      multiply_groups(call, {0, 1 + kMaxMoeWaves}, all);
      for (int source = 0; source < coords_.world; ++source) add_up(call, source, all);
      return;
    case RowsFrom::local:
      multiply_groups(call, {0, 1}, all);
      return add_up(call, coords_.rank, all);
    case RowsFrom::remote:
      return multiply_groups(call, {1, kMaxMoeWaves}, columns_of(plan, group));
  }
}

void MoeGemmCombineCpu::add_up(const Call& call, int source, Range columns) {
  const ScopedSpan span(SpanKind::compute, "moe_sum", int(columns.begin), source);
  const int64_t rows = call.rows.arrived(source);
  const size_t row_bytes = size_t(columns.count) * size_of(coords_.shape.dtype);
  std::byte* const to = workspace_.scratch() + offset(source, rows, columns);
  const auto* y = products_.view(DType::f32, call.rows.slots(), columns.count).as<float>();
  cpu::parallel_ranges(rows, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      sum_uses(call.rows.uses(source, row), y, columns.count, call.weighted, coords_.shape.dtype,
               to + size_t(row) * row_bytes);
    }
  });
}

void MoeGemmCombineCpu::send_sums(const OverlapOptions& plan, const Call& call, int group) {
  const ScopedLabel label("moe_gemm_combine", -1);
  if (group == 0 && call.row_values.dims() > 0) send_values(call);
  const Range columns = columns_of(plan, group);
  for (int step = 1; step < coords_.world; ++step) {
    const int to = moe_target(coords_.rank, coords_.world, step);
    const int64_t rows = call.rows.arrived(to);
    if (plan.strategy == Strategy::overlapped) add_up(call, to, columns);
    std::byte* const sums = workspace_.scratch() + offset(to, rows, columns);
    if (plan.wire.is_none()) {
      workspace_.put(to, offset(coords_.rank, rows, columns), sums,
                     size_t(rows * columns.count) * size_of(coords_.shape.dtype),
                     group_signal(coords_.rank, group));
      continue;
    }
    const size_t at = messages_before(plan, rows, group);
    std::byte* const messages = workspace_.scratch() + size_t(coords_.world) * source_bytes_ +
                                size_t(to) * message_bytes_ + at;
    size_t bytes = 0;
    {
      const ScopedSpan span(SpanKind::compute, "moe_encode", group, to);
      const Tensor values(sums, coords_.shape.dtype, {rows, columns.count});
      bytes = messages_of(columns).encode(values, messages);
    }
    workspace_.put(to, size_t(coords_.rank) * source_bytes_ + at, messages, bytes,
                   group_signal(coords_.rank, group));
  }
}

void MoeGemmCombineCpu::decode(const OverlapOptions& plan, const Call& call, int group) {
  const Range columns = columns_of(plan, group);
  if (group == 0) {
    int64_t rows = 0;
    for (int source = 0; source < coords_.world; ++source) {
      decoded_begin_[size_t(source)] = rows;
      if (source != coords_.rank) rows += int64_t(call.rows.sent(source).size());
    }
    decoded_.of(coords_.shape.dtype, rows, coords_.shape.hidden);
  }
  const ScopedSpan span(SpanKind::compute, "moe_decode", group);
  for (int source = 0; source < coords_.world; ++source) {
    if (source == coords_.rank) continue;
    const auto rows = int64_t(call.rows.sent(source).size());
    messages_of(columns).decode(
        workspace_.shared() + size_t(source) * source_bytes_ + messages_before(plan, rows, group),
        rows, decoded_sums(source) + offset_in_sums(rows, columns));
  }
}

std::byte* MoeGemmCombineCpu::decoded_sums(int source) const {
  const int64_t row = decoded_begin_[size_t(source)];
  return decoded_.view(coords_.shape.dtype, 0, 0).as<std::byte>() + size_t(row) * coords_.row_bytes;
}

void MoeGemmCombineCpu::reduce(const OverlapOptions& plan, const Call& call, int group) {
  const Range columns = columns_of(plan, group);
  const ScopedSpan span(SpanKind::compute, "moe_combine", int(columns.begin));
  const Tensor& out = call.out;
  const size_t element = size_of(coords_.shape.dtype), row_bytes = size_t(columns.count) * element;
  const size_t out_row_bytes = size_t(out.stride(0)) * size_of(out.dtype());
  cpu::parallel_ranges(call.rows.local_rows(), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    std::vector<const std::byte*> partials;
    for (int64_t row = begin; row < end; ++row) {
      partials.clear();
      for (const auto& [rank, at] : call.rows.copies(row)) {
        const auto sent = int64_t(call.rows.sent(rank).size());
        if (rank == coords_.rank) {  // local sums hold all columns at once
          partials.push_back(workspace_.scratch() + size_t(rank) * source_bytes_ +
                             size_t(at) * coords_.row_bytes + size_t(columns.begin) * element);
          continue;
        }
        const std::byte* arrived = plan.wire.is_none()
                                       ? workspace_.shared() + size_t(rank) * source_bytes_
                                       : decoded_sums(rank);
        partials.push_back(arrived + offset_in_sums(sent, columns) + size_t(at) * row_bytes);
      }
      sum_partials(partials, coords_.shape.dtype, columns.count, out.dtype(),
                   out.as<std::byte>() + size_t(row) * out_row_bytes +
                       size_t(columns.begin) * size_of(out.dtype()));
    }
  });
}

void MoeGemmCombineCpu::sum_ranks(const OverlapOptions& plan, const Call& call) {
  const ScopedLabel label("moe_gemm_combine", -1);
  for (int group = 0; group < plan.chunks; ++group) {
    for (int step = 1; step < coords_.world; ++step) {
      const int source = moe_source(coords_.rank, coords_.world, step);
      workspace_.await(group_signal(source, group), source, group);
    }
    if (coords_.world > 1 && !plan.wire.is_none()) decode(plan, call, group);
    reduce(plan, call, group);
  }
  if (call.row_values.dims() > 0) take_values(call);
}

}  // namespace tandem
