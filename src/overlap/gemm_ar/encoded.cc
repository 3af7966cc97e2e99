// Two-shot GEMM+AR in a wire format.
#include "collectives/partial_sums.h"
#include "kernels/norm.h"
#include "observe/recorder.h"
#include "overlap/gemm_ar/cpu.h"

namespace tandem {

using namespace schedule;

size_t GemmArCpu::messages_before(int panels, int owner, int panel) const {
  return bytes_before(messages_, panel, [&](int i) { return rows_of(panels, owner, i).count; });
}

std::byte* GemmArCpu::decoded(int rank) const {
  return decoded_.data() + size_t(rank * rows_of(1, 0, 0).count) * row_bytes_;
}

void GemmArCpu::send_encoded_partials(int panel, int panels) {
  for (int step = 0; step < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    if (owner == rank_ && desc_.wire.is_exact()) continue;
    const Range rows = rows_of(panels, owner, panel);
    const size_t at = messages_before(panels, owner, panel);
    std::byte* messages =
        workspace_.scratch() + partial_bytes_ + size_t(owner) * encoded_area_ + at;
    size_t bytes = 0;
    {
      const ScopedSpan span(SpanKind::compute, "gemm_ar", panel, owner);
      const Tensor values(partial(rows.begin), desc_.partial(), {rows.count, desc_.n});
      bytes = messages_.encode(values, messages);
    }
    if (owner == rank_) continue;
    workspace_.put(owner, size_t(rank_) * area_ + at, messages, bytes,
                   partial_signal(rank_, panel));
  }
}

void GemmArCpu::reduce_encoded(int panel, int panels, const Operands& call) {
  const Range rows = rows_of(panels, rank_, panel);
  const size_t at = messages_before(panels, rank_, panel);
  const size_t result_at = results_at_ + size_t(rank_) * encoded_area_ + at;
  for (int step = 0; step + 1 < world_; ++step) {
    const int source = rs_source(rank_, world_, step);
    workspace_.await(partial_signal(source, panel), source, panel);
  }
  std::byte* const sums = decoded(rank_);
  std::byte* const result = workspace_.shared() + result_at;
  size_t bytes = 0;
  {
    const ScopedSpan span(SpanKind::compute, "gemm_ar", panel);
    for (int source = 0; source < world_; ++source) {
      if (source == rank_ && desc_.wire.is_exact()) {
        partials_[size_t(source)] = partial(rows.begin);
        continue;
      }
      const std::byte* messages =
          source == rank_
              ? workspace_.scratch() + partial_bytes_ + size_t(rank_) * encoded_area_ + at
              : workspace_.shared() + size_t(source) * area_ + at;
      messages_.decode(messages, rows.count, decoded(source));
      partials_[size_t(source)] = decoded(source);
    }
    const Tensor to(sums, desc_.partial(), {rows.count, desc_.n});
    reduce_partials(partials_, desc_.partial(), call.bias, to);
    bytes = messages_.encode(to, result);
  }
  for (int step = 0; step + 1 < world_; ++step) {
    workspace_.put(rs_owner(rank_, world_, step), result_at, result, bytes,
                   result_signal(rank_, panel));
  }
  take_sums(rows, result, sums, call);
}

void GemmArCpu::collect_encoded(int panel, int panels, const Operands& call) {
  for (int step = 0; step + 1 < world_; ++step) {
    const int owner = rs_source(rank_, world_, step);
    workspace_.await(result_signal(owner, panel), owner, panel);
    const size_t at = size_t(owner) * encoded_area_ + messages_before(panels, owner, panel);
    take_sums(rows_of(panels, owner, panel), workspace_.shared() + results_at_ + at, decoded(owner),
              call);
  }
}

void GemmArCpu::take_sums(const Range& rows, const std::byte* messages, std::byte* sums,
                          const Operands& call) {
  const ScopedSpan span(SpanKind::compute, "gemm_ar");
  messages_.decode(messages, rows.count, sums);
  const Tensor out = call.out.rows(rows.begin, rows.count);
  if (!call.add_norm) return copy_rows(sums, out);
  const AddNorm& tail = *call.add_norm;
  const Tensor residual = tail.residual.rows(rows.begin, rows.count);
  const Tensor hidden = tail.hidden.rows(rows.begin, rows.count);
  const std::byte* const partial_sums[] = {sums};
  reduce_partials(partial_sums, desc_.partial(), nullptr, hidden, &residual);
  rms_norm(Exec{}, hidden, tail.gain, tail.eps, out);
}

}  // namespace tandem
