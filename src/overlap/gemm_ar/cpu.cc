#include "overlap/gemm_ar/cpu.h"

#include <algorithm>

#include "collectives/partial_sums.h"
#include "kernels/norm.h"
#include "observe/recorder.h"
#include "overlap/contract/encoded_candidates.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {
size_t result_bytes(const OpDesc& desc) {
  return size_t(desc.m * desc.n) * size_of(desc.partial());
}

bool sends_uncompressed(const OpDesc& desc) {
  return desc.wire.is_none() || desc.allow_uncompressed;
}

size_t whole_messages(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

/// Bytes of uncompressed partial sums that each source may store at an owner.
size_t uncompressed_area(const OpDesc& desc, int world, bool one_shot) {
  if (!sends_uncompressed(desc)) return 0;
  const int64_t rows = ar_rows_bound(desc.m, world, kMaxChunks);
  return size_t(one_shot ? std::max(desc.m, rows) : rows) * size_t(desc.n) *
         size_of(desc.partial());
}

// One-shot moves world / 2 times the bytes but takes one latency instead of two.
bool one_shot_allowed(const OpDesc& desc) {
  return sends_uncompressed(desc) && result_bytes(desc) <= size_t(256) << 10;
}
// Size up to which latency certainly outweighs bytes.
bool one_shot_preferred(const OpDesc& desc) {
  return result_bytes(desc) <= size_t(16) << 10;
}

// Destination of the sums of these rows.
Tensor sums_of(const Operands& call, int64_t begin, int64_t count) {
  return (call.add_norm ? call.add_norm->hidden : call.out).rows(begin, count);
}

// Norms rows of hidden that are complete.
void norm_rows(const AddNorm* tail, const Tensor& out, int64_t begin, int64_t count) {
  if (tail)
    rms_norm(Exec{}, tail->hidden.rows(begin, count), tail->gain, tail->eps,
             out.rows(begin, count));
}

void sum_rows(std::span<const std::byte* const> partials, DType dtype, const Tensor* bias,
              const AddNorm* tail, int64_t begin, const Tensor& sums) {
  if (!tail) return reduce_partials(partials, dtype, bias, sums);
  const Tensor residual = tail->residual.rows(begin, sums.dim(0));
  reduce_partials(partials, dtype, bias, sums, &residual);
}
}  // namespace

GemmArCpu::GemmArCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()),
      world_(comm.size()),
      desc_(desc),
      product_(desc),
      row_bytes_(size_t(desc.n) * size_of(desc.partial())),
      messages_(desc.wire, desc.partial(), desc.n),
      encoded_area_(max_bytes(messages_, world_,
                              [this](int panels, int owner, int panel) {
                                return rows_of(panels, owner, panel).count;
                              })),
      area_(whole_messages(
          std::max(uncompressed_area(desc, world_, one_shot_allowed(desc)), encoded_area_))),
      results_at_(size_t(world_) * area_),
      partial_bytes_(whole_messages(size_t(desc.m) * row_bytes_)),
      workspace_(comm, "gemm_ar",
                 results_at_ + std::max(sends_uncompressed(desc) ? size_t(desc.m) * row_bytes_ : 0,
                                        size_t(world_) * encoded_area_),
                 world_ == 1 ? 0 : partial_bytes_ + size_t(world_) * encoded_area_,
                 2 * world_ * kMaxChunks),
      decoded_(encoded_area_ ? size_t(world_) * size_t(rows_of(1, 0, 0).count) * row_bytes_ : 0),
      partials_(size_t(world_)) {}

std::vector<Candidate> GemmArCpu::candidates(const std::vector<int>& chunk_counts) {
  return uncompressed_and_encoded(desc_, [&](bool encoded) {
    std::vector<Candidate> all = chunked_candidates(
        chunk_counts, [this, encoded](Strategy, int panels, const Operands& call) {
          world_ == 1 ? run_alone(call) : run(panels, encoded, call);
        });
    if (encoded || !one_shot_allowed(desc_)) return all;
    const Candidate one_shot{
        "serial, 1 chunk, one-shot", Strategy::serial,
        [this](const Operands& call) { world_ == 1 ? run_alone(call) : run_one_shot(call); }};
    all.insert(all.begin() + (one_shot_preferred(desc_) ? 0 : 1), one_shot);
    return all;
  });
}

Range GemmArCpu::rows_of(int panels, int owner, int panel) const {
  return ar_rows(desc_.m, world_, panels, panel, owner);
}

std::byte* GemmArCpu::partial(int64_t row) const {
  return workspace_.scratch() + size_t(row) * row_bytes_;
}

void GemmArCpu::product(int panel, int panels) {
  const Range rows = split(desc_.m, panels, panel);
  const Tensor out(partial(rows.begin), desc_.partial(), {rows.count, desc_.n});
  const ScopedLabel label("gemm_ar", panel);
  product_.run_local(rows.begin, rows.count, out);
}

void GemmArCpu::send_partials(int panel, int panels) {
  for (int step = 0; step + 1 < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    const Range rows = rows_of(panels, owner, panel);
    const int64_t before = ar_rows_before(desc_.m, world_, panels, panel, owner);
    workspace_.put(owner, size_t(rank_) * area_ + size_t(before) * row_bytes_, partial(rows.begin),
                   size_t(rows.count) * row_bytes_, partial_signal(rank_, panel));
  }
}

void GemmArCpu::reduce(int panel, int panels, const Operands& call) {
  const Range rows = rows_of(panels, rank_, panel);
  const int64_t before = ar_rows_before(desc_.m, world_, panels, panel, rank_);
  for (int source = 0; source < world_; ++source) {
    partials_[size_t(source)] = source == rank_ ? partial(rows.begin)
                                                : workspace_.shared() + size_t(source) * area_ +
                                                      size_t(before) * row_bytes_;
  }
  for (int step = 0; step + 1 < world_; ++step) {
    const int source = rs_source(rank_, world_, step);
    workspace_.await(partial_signal(source, panel), source, panel);
  }
  std::byte* sums = workspace_.shared() + results_at_ + size_t(rows.begin) * row_bytes_;
  {
    const ScopedSpan span(SpanKind::compute, "gemm_ar", panel);
    sum_rows(partials_, desc_.partial(), call.bias, call.add_norm, rows.begin,
             Tensor(sums, desc_.partial(), {rows.count, desc_.n}));
  }
  for (int step = 0; step + 1 < world_; ++step) {
    workspace_.put(rs_owner(rank_, world_, step), results_at_ + size_t(rows.begin) * row_bytes_,
                   sums, size_t(rows.count) * row_bytes_, result_signal(rank_, panel));
  }
  const ScopedSpan span(SpanKind::compute, "gemm_ar", panel);
  copy_rows(sums, sums_of(call, rows.begin, rows.count));
  norm_rows(call.add_norm, call.out, rows.begin, rows.count);
}

void GemmArCpu::collect(int panel, int panels, const Operands& call) {
  for (int step = 0; step + 1 < world_; ++step) {
    const int owner = rs_source(rank_, world_, step);
    workspace_.await(result_signal(owner, panel), owner, panel);
    const ScopedSpan span(SpanKind::compute, "gemm_ar", panel, owner);
    const Range rows = rows_of(panels, owner, panel);
    copy_rows(workspace_.shared() + results_at_ + size_t(rows.begin) * row_bytes_,
              sums_of(call, rows.begin, rows.count));
    norm_rows(call.add_norm, call.out, rows.begin, rows.count);
  }
}

void GemmArCpu::run_one_shot(const Operands& call) {
  workspace_.begin();
  product_.begin(call);
  product(0, 1);
  for (int step = 0; step + 1 < world_; ++step) {
    workspace_.put(rs_owner(rank_, world_, step), size_t(rank_) * area_, partial(0),
                   size_t(desc_.m) * row_bytes_, partial_signal(rank_, 0));
  }
  for (int source = 0; source < world_; ++source) {
    partials_[size_t(source)] =
        source == rank_ ? partial(0) : workspace_.shared() + size_t(source) * area_;
    if (source != rank_) workspace_.await(partial_signal(source, 0), source, 0);
  }
  const ScopedSpan span(SpanKind::compute, "gemm_ar", 0);
  sum_rows(partials_, desc_.partial(), call.bias, call.add_norm, 0, sums_of(call, 0, desc_.m));
  norm_rows(call.add_norm, call.out, 0, desc_.m);
}

void GemmArCpu::run_alone(const Operands& call) {
  product_.begin(call);
  product_.run_local(0, desc_.m, call.out, call.bias);
  if (!call.add_norm) return;
  const ScopedSpan span(SpanKind::compute, "gemm_ar", 0);
  for (int64_t row = 0; row < desc_.m; ++row) {
    const std::byte* const product[] = {call.out.rows(row, 1).as<std::byte>()};
    sum_rows(product, desc_.partial(), nullptr, call.add_norm, row, sums_of(call, row, 1));
  }
  norm_rows(call.add_norm, call.out, 0, desc_.m);
}

void GemmArCpu::run(int panels, bool encoded, const Operands& call) {
  workspace_.begin();
  product_.begin(call);
  // Pipelined over panels: while panel p is computed, sums of p - 1 are sent and those of p - 2
  // received.
  for (int panel = 0; panel < panels + 2; ++panel) {
    if (panel < panels) {
      product(panel, panels);
      encoded ? send_encoded_partials(panel, panels) : send_partials(panel, panels);
    }
    if (panel >= 1 && panel <= panels) {
      encoded ? reduce_encoded(panel - 1, panels, call) : reduce(panel - 1, panels, call);
    }
    if (panel >= 2) {
      encoded ? collect_encoded(panel - 2, panels, call) : collect(panel - 2, panels, call);
    }
  }
}

}  // namespace tandem
