#include "overlap/gemm_ar/cpu.h"

#include <algorithm>

#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "observe/recorder.h"
#include "overlap/reduce.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {
size_t result_bytes(const GemmAr::Shape& shape) {
  return size_t(shape.m * shape.n) * size_of(shape.dtype);
}

// Rows of hidden, once they are there.
void norm_rows(const AddNorm* tail, const Tensor& out, int64_t begin, int64_t count) {
  if (tail)
    rms_norm(tail->hidden.rows(begin, count), tail->gain, tail->eps, out.rows(begin, count));
}

void sum_rows(std::span<const std::byte* const> parts, DType dtype, const Tensor* bias,
              const AddNorm* tail, int64_t begin, const Tensor& sums) {
  if (!tail) return reduce_partials(parts, dtype, bias, sums);
  const Tensor residual = tail->residual.rows(begin, sums.dim(0));
  reduce_partials(parts, dtype, bias, sums, &residual);
}
}  // namespace

bool one_shot_allowed(const GemmAr::Shape& shape) {
  return result_bytes(shape) <= size_t(256) << 10;
}
bool one_shot_preferred(const GemmAr::Shape& shape) {
  return result_bytes(shape) <= size_t(16) << 10;
}

GemmArCpu::GemmArCpu(Communicator& comm, const GemmAr::Shape& shape)
    : rank_(comm.rank()),
      world_(comm.size()),
      shape_(shape),
      line_(size_t(shape.n) * size_of(shape.dtype)),
      area_rows_(one_shot_allowed(shape)
                     ? std::max(shape.m, ar_rows_bound(shape.m, world_, kMaxChunks))
                     : ar_rows_bound(shape.m, world_, kMaxChunks)),
      results_at_(size_t(world_ * area_rows_) * line_),
      workspace_(comm, "gemm_ar", results_at_ + size_t(shape.m) * line_,
                 world_ == 1 ? 0 : size_t(shape.m) * line_, 2 * world_ * kMaxChunks),
      parts_(size_t(world_)) {}

Tensor GemmArCpu::Call::sums(int64_t begin, int64_t count) const {
  return (add_norm ? add_norm->hidden : out).rows(begin, count);
}

std::byte* GemmArCpu::partial(int64_t row) const {
  return workspace_.scratch() + size_t(row) * line_;
}

void GemmArCpu::product(int panel, const Plan& plan, const Tensor& x, const Tensor& weight) {
  const Range rows = split(shape_.m, plan.chunks, panel);
  const Tensor out(partial(rows.begin), shape_.dtype, {rows.count, shape_.n});
  const ScopedLabel label("gemm_ar", panel);
  gemm(x.rows(rows.begin, rows.count), weight.transposed(), out);
}

void GemmArCpu::send_partials(int panel, const Plan& plan) {
  for (int step = 0; step + 1 < world_; ++step) {
    const int owner = rs_owner(rank_, world_, step);
    const Range rows = ar_rows(shape_.m, world_, plan.chunks, panel, owner);
    const int64_t before = ar_rows_before(shape_.m, world_, plan.chunks, panel, owner);
    workspace_.put(owner, size_t(rank_ * area_rows_ + before) * line_, partial(rows.begin),
                   size_t(rows.count) * line_, partial_signal(rank_, panel));
  }
}

void GemmArCpu::reduce(int panel, const Plan& plan, const Call& call) {
  const Range rows = ar_rows(shape_.m, world_, plan.chunks, panel, rank_);
  const int64_t before = ar_rows_before(shape_.m, world_, plan.chunks, panel, rank_);
  for (int source = 0; source < world_; ++source) {
    parts_[size_t(source)] =
        source == rank_ ? partial(rows.begin)
                        : workspace_.shared() + size_t(source * area_rows_ + before) * line_;
  }
  for (int step = 0; step + 1 < world_; ++step) {
    const int source = rs_source(rank_, world_, step);
    workspace_.await(partial_signal(source, panel), source, panel);
  }
  std::byte* sums = workspace_.shared() + results_at_ + size_t(rows.begin) * line_;
  {
    const ScopedSpan span(SpanKind::compute, "gemm_ar", panel);
    sum_rows(parts_, shape_.dtype, call.bias, call.add_norm, rows.begin,
             Tensor(sums, shape_.dtype, {rows.count, shape_.n}));
  }
  for (int step = 0; step + 1 < world_; ++step) {
    workspace_.put(rs_owner(rank_, world_, step), results_at_ + size_t(rows.begin) * line_, sums,
                   size_t(rows.count) * line_, result_signal(rank_, panel));
  }
  const ScopedSpan span(SpanKind::compute, "gemm_ar", panel);
  copy_rows(sums, call.sums(rows.begin, rows.count));
  norm_rows(call.add_norm, call.out, rows.begin, rows.count);
}

void GemmArCpu::collect(int panel, const Plan& plan, const Call& call) {
  for (int step = 0; step + 1 < world_; ++step) {
    const int owner = rs_source(rank_, world_, step);
    workspace_.await(result_signal(owner, panel), owner, panel);
    const ScopedSpan span(SpanKind::compute, "gemm_ar", panel, owner);
    const Range rows = ar_rows(shape_.m, world_, plan.chunks, panel, owner);
    copy_rows(workspace_.shared() + results_at_ + size_t(rows.begin) * line_,
              call.sums(rows.begin, rows.count));
    norm_rows(call.add_norm, call.out, rows.begin, rows.count);
  }
}

void GemmArCpu::run_one_shot(const Call& call) {
  for (int step = 0; step + 1 < world_; ++step) {
    workspace_.put(rs_owner(rank_, world_, step), size_t(rank_ * area_rows_) * line_, partial(0),
                   size_t(shape_.m) * line_, partial_signal(rank_, 0));
  }
  for (int source = 0; source < world_; ++source) {
    parts_[size_t(source)] =
        source == rank_ ? partial(0) : workspace_.shared() + size_t(source * area_rows_) * line_;
    if (source != rank_) workspace_.await(partial_signal(source, 0), source, 0);
  }
  const ScopedSpan span(SpanKind::compute, "gemm_ar", 0);
  sum_rows(parts_, shape_.dtype, call.bias, call.add_norm, 0, call.sums(0, shape_.m));
  norm_rows(call.add_norm, call.out, 0, shape_.m);
}

void GemmArCpu::run_alone(const Tensor& x, const Tensor& weight, const Call& call) {
  gemm(x, weight.transposed(), call.out, {call.bias, false});
  if (!call.add_norm) return;
  const ScopedSpan span(SpanKind::compute, "gemm_ar", 0);
  for (int64_t row = 0; row < shape_.m; ++row) {
    const std::byte* const product[] = {call.out.rows(row, 1).as<std::byte>()};
    sum_rows(product, shape_.dtype, nullptr, call.add_norm, row, call.sums(row, 1));
  }
  norm_rows(call.add_norm, call.out, 0, shape_.m);
}

void GemmArCpu::run(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
                    const Tensor* bias, const AddNorm* add_norm) {
  const Call call{out, bias, add_norm};
  if (world_ == 1) return run_alone(x, weight, call);
  workspace_.begin();
  if (plan.one_shot) {
    product(0, plan, x, weight);
    return run_one_shot(call);
  }
  // Two panels behind the product: sums of panel p - 1 leave, those of p - 2 have come.
  for (int panel = 0; panel < plan.chunks + 2; ++panel) {
    if (panel < plan.chunks) {
      product(panel, plan, x, weight);
      send_partials(panel, plan);
    }
    if (panel >= 1 && panel <= plan.chunks) reduce(panel - 1, plan, call);
    if (panel >= 2) collect(panel - 2, plan, call);
  }
}

}  // namespace tandem
