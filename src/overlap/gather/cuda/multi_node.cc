#include "overlap/gather/cuda/multi_node.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/cuda/uncompressed_nccl.h"
#include "collectives/gpu.h"
#include "kernels/cuda/add_norm.h"
#include "kernels/cuda/reduce.h"
#include "overlap/contract/cuda/gpu_operator.h"
#include "schedule/ring.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

// Operators that sum over ranks add the bias once, on rank 0.
GemmShape gemm_shape(const GpuCommunicator& comm, const OpDesc& s, int64_t rows) {
  const bool bias = s.bias && (s.collective == Collective::all_gather || comm.rank() == 0);
  return product_of(s, rows, bias);
}

const OpDesc& without_scales(const OpDesc& shape) {
  if (!shape.scaled() &&
      (shape.collective == Collective::all_gather || shape.result() == shape.dtype))
    return shape;
  if (!shape.scaled()) {
    throw Unsupported(fmt::format("{} across nodes: out_dtype f32 with dtype {}: expected f32",
                                  shape.op, name_of(shape.dtype)));
  }
  throw Unsupported(
      fmt::format("{} across nodes: dtype e4m3: expected f32, bf16 or f16", shape.op));
}

}  // namespace

AcrossNodes::AcrossNodes(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape)
    : comm_(comm),
      gathers_(shape.collective == Collective::all_gather),
      scatters_(shape.collective == Collective::reduce_scatter),
      sums_(shape.collective == Collective::all_reduce),
      shape_((check_shape(comm, shape.op, shape, !gathers_, gathers_), without_scales(shape))),
      whole_memory_(size_t(shape.m * (gathers_ ? shape.k : shape.n)) * size_of(shape.dtype)),
      moved_(size_t(comm.size())),
      computed_(size_t(comm.size())) {
  for (int r = 0; r <= comm.size(); ++r) {
    const int64_t rows = r < comm.size() ? shard(r).count : shape.m;
    if (shape_.gradient) {
      wgrads_.emplace_back(lt, shape, rows);
    } else if (!sums_ || r == comm.size()) {
      gemms_.emplace_back(lt, gemm_shape(comm, shape, rows));
    }
  }
  agree_on_gemm_choices(comm, lt);
  if (scatters_) {
    slots_ = DeviceMemory(size_t(shard(comm.rank()).count * shape.n * comm.size()) *
                          size_of(shape.dtype));
  }
}

std::vector<Algorithm> AcrossNodes::algorithms() const {
  if (sums_ || comm_.size() == 1) return {Algorithm::serial_nccl};
  if (scatters_ && comm_.size() > kMaxPartials) return {Algorithm::serial_nccl};
  return {Algorithm::serial_nccl, Algorithm::chunked};
}

Tensor AcrossNodes::gathered() const {
  return whole_memory_.view(shape_.dtype, {shape_.m, shape_.k});
}

Tensor AcrossNodes::rows_of(const DeviceMemory& memory, int64_t columns, int rank) const {
  const Shard rows = shard(rank);
  return memory.view(shape_.dtype, {shape_.m, columns}).rows(rows.begin, rows.count);
}

void AcrossNodes::run(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                      const Tensor* bias, const Scales* scales, const AddNorm* add_norm) {
  comm_.check_device();
  const int64_t local = shard(comm_.rank()).count;
  if (shape_.gradient) {
    check_wgrad_operands(comm_, shape_, local, x, weight, out);
  } else {
    check_operands(comm_, shape_.op, shape_, gathers_ ? local : shape_.m,
                   scatters_ ? local : shape_.m, x, weight, out, bias, scales);
    check_add_norm_operands(comm_, shape_.op, shape_, add_norm);
  }
  if (std::ranges::count(algorithms(), algorithm) == 0) {
    throw InvalidArgument(
        fmt::format("{} across nodes: algorithm {}: expected serial_nccl or chunked", shape_.op,
                    name_of(algorithm)));
  }
  const void* bias_data = bias ? bias->data() : nullptr;
  const Enqueueing call(comm_);
  comm_.enqueue([&] {
    if (algorithm == Algorithm::serial_nccl) return run_serial(x, weight, out, bias_data, add_norm);
    gathers_ ? gather_chunked(x, weight, out, bias_data)
             : scatter_chunked(x, weight, out, bias_data);
  });
}

void AcrossNodes::run_serial(const Tensor& x, const Tensor& weight, const Tensor& out,
                             const void* bias_data, const AddNorm* add_norm) {
  if (gathers_) {
    gpu::all_gather(comm_, x, gathered());
    return multiply(comm_.size(), gathered().data(), weight, out, bias_data);
  }
  const Tensor partial = sums_ ? out : whole_memory_.view(shape_.dtype, {shape_.m, shape_.n});
  gemms_.back().run(x.data(), weight.data(), partial.data(), bias_data, comm_.stream());
  if (sums_) {
    gpu::all_reduce(comm_, out, ReduceOp::sum);
    if (add_norm) launch_add_norm(out, *add_norm, out, comm_.stream());
    return;
  }
  gpu::reduce_scatter(comm_, partial, out, ReduceOp::sum);
}

void AcrossNodes::exchange(const Tensor& to_send, int to, const Tensor& to_receive, int from) {
  nccl_exchange(comm_, to_send, to, to_receive, from, side_.get());
}

void AcrossNodes::gather_chunked(const Tensor& x, const Tensor& weight, const Tensor& out,
                                 const void* bias) {
  const int rank = comm_.rank(), world = comm_.size();
  begun_.record(comm_.stream());  // the last call has read the buffers that are now written
  begun_.block(side_.get());
  for (int step = 1; step < world; ++step) {
    const int from = schedule::ag_source(rank, world, step);
    exchange(x, schedule::ag_target(rank, world, step), rows_of(whole_memory_, shape_.k, from),
             from);
    moved_[size_t(from)].record(side_.get());
  }
  if (shape_.keep_gathered) {
    check(cudaMemcpyAsync(rows_of(whole_memory_, shape_.k, rank).data(), x.data(), x.bytes(),
                          cudaMemcpyDefault, side_.get()),
          "copy the own shard");
    moved_[size_t(rank)].record(side_.get());
  }
  for (int step = 0; step < world; ++step) {
    const int source = schedule::ag_source(rank, world, step);
    if (step > 0) moved_[size_t(source)].block(comm_.stream());
    const void* in = step == 0 ? x.data() : rows_of(whole_memory_, shape_.k, source).data();
    multiply(source, in, weight, out, bias);
  }
  if (shape_.keep_gathered) moved_[size_t(rank)].block(comm_.stream());
}

// Multiplies the rows of rank `source`, or all if `source` is the number of ranks, stored at `in`.
void AcrossNodes::multiply(int source, const void* in, const Tensor& weight, const Tensor& out,
                           const void* bias) {
  const Shard rows = source < comm_.size() ? shard(source) : Shard{0, shape_.m};
  if (shape_.gradient) {
    const Tensor dy = weight.rows(rows.begin, rows.count);
    wgrads_[size_t(source)].add(in, dy.data(), out.data(), comm_.stream());
  } else {
    gemms_[size_t(source)].run(in, weight.data(), out.rows(rows.begin, rows.count).data(), bias,
                               comm_.stream());
  }
}

void AcrossNodes::scatter_chunked(const Tensor& x, const Tensor& weight, const Tensor& out,
                                  const void* bias) {
  const int rank = comm_.rank(), world = comm_.size();
  const int64_t local = shard(rank).count;
  const auto slot = [&](int source) {
    return slots_.view(shape_.dtype, {local * world, shape_.n}).rows(local * source, local);
  };
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  for (int step = 0; step < world; ++step) {
    const int owner = schedule::rs_owner(rank, world, step);
    const int from = schedule::rs_source(rank, world, step);
    const Shard rows = shard(owner);
    const Tensor partial_rows = rows_of(whole_memory_, shape_.n, owner);
    gemms_[size_t(owner)].run(x.rows(rows.begin, rows.count).data(), weight.data(),
                              partial_rows.data(), bias, comm_.stream());
    if (owner == rank) break;
    computed_[size_t(owner)].record(comm_.stream());
    computed_[size_t(owner)].block(side_.get());
    exchange(partial_rows, owner, slot(from), from);
  }
  moved_[0].record(side_.get());
  moved_[0].block(comm_.stream());
  Partials partials;
  partials.count = world;
  for (int r = 0; r < world; ++r) {
    partials.of[r] = r == rank ? rows_of(whole_memory_, shape_.n, rank).data() : slot(r).data();
  }
  launch_sum(partials, out, comm_.stream());
}

std::unique_ptr<OverlapOperator> make_across_nodes(GpuCommunicator& comm, const OpDesc& desc,
                                                   const OverlapOptions& options) {
  return std::make_unique<GpuOperator<AcrossNodes>>(comm, desc, options, nullptr);
}

}  // namespace tandem::gpu
