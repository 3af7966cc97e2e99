#include "overlap/cuda/across_nodes.h"

#include <fmt/format.h>

#include "collectives/gpu.h"
#include "kernels/cuda/reduce.h"

namespace tandem::gpu {
namespace {

// What sums over ranks takes the bias once, from rank 0.
GemmShape gemm_shape(const NcclCommunicator& comm, OverlapOp op, const DenseShape& s,
                     int64_t rows) {
  const bool bias = s.bias && (op == OverlapOp::ag_gemm || comm.rank() == 0);
  return s.product(rows, bias);
}

const DenseShape& without_scales(OverlapOp op, const DenseShape& shape) {
  if (!shape.scaled()) return shape;
  throw Unsupported(
      fmt::format("{} across nodes: dtype e4m3: expected f32, bf16 or f16", tandem::name_of(op)));
}

}  // namespace

AcrossNodes::AcrossNodes(NcclCommunicator& comm, const LtContext& lt, OverlapOp op,
                         const DenseShape& shape)
    : comm_(comm),
      op_(op),
      shape_((
          check_shape(comm, name_of(op), shape, op != OverlapOp::ag_gemm, op == OverlapOp::ag_gemm),
          without_scales(op, shape))),
      whole_(lt, gemm_shape(comm, op, shape, shape.m)),
      whole_memory_(size_t(shape.m * (op == OverlapOp::ag_gemm ? shape.k : shape.n)) *
                    size_of(shape.dtype)),
      moved_(size_t(comm.size())),
      computed_(size_t(comm.size())) {
  if (op == OverlapOp::gemm_ar) return;
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt, gemm_shape(comm, op, shape, shard(r).count));
  }
  if (op == OverlapOp::gemm_rs) {
    slots_ = DeviceMemory(size_t(shard(comm.rank()).count * shape.n * comm.size()) *
                          size_of(shape.dtype));
  }
}

std::vector<Way> AcrossNodes::ways() const {
  if (op_ == OverlapOp::gemm_ar || comm_.size() == 1) return {Way::serial_nccl};
  return {Way::serial_nccl, Way::chunked};
}

Tensor AcrossNodes::gathered() const {
  return whole_memory_.view(shape_.dtype, {shape_.m, shape_.k});
}

Tensor AcrossNodes::rows_of(const DeviceMemory& memory, int64_t columns, int rank) const {
  const Shard rows = shard(rank);
  return memory.view(shape_.dtype, {shape_.m, columns}).rows(rows.begin, rows.count);
}

void AcrossNodes::run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                      const Tensor* bias, const Scales* scales) {
  comm_.check_device();
  const bool gathers = op_ == OverlapOp::ag_gemm;
  const int64_t own = shard(comm_.rank()).count;
  check_operands(comm_, name_of(op_), shape_, gathers ? own : shape_.m,
                 op_ == OverlapOp::gemm_rs ? own : shape_.m, x, weight, out, bias, scales);
  const void* bias_data = bias ? bias->data() : nullptr;
  if (way == Way::chunked && op_ != OverlapOp::gemm_ar) {
    return gathers ? gather_chunked(x, weight, out, bias_data)
                   : scatter_chunked(x, weight, out, bias_data);
  }
  if (way != Way::serial_nccl) {
    throw InvalidArgument(fmt::format("{} across nodes: way {}: expected serial_nccl or chunked",
                                      name_of(op_), name_of(way)));
  }
  if (gathers) {
    gpu::all_gather(comm_, x, gathered());
    whole_.run(gathered().data(), weight.data(), out.data(), bias_data, comm_.stream());
    return;
  }
  const Tensor partial =
      op_ == OverlapOp::gemm_ar ? out : whole_memory_.view(shape_.dtype, {shape_.m, shape_.n});
  whole_.run(x.data(), weight.data(), partial.data(), bias_data, comm_.stream());
  if (op_ == OverlapOp::gemm_ar) return gpu::all_reduce(comm_, out, ReduceOp::sum);
  gpu::reduce_scatter(comm_, partial, out, ReduceOp::sum);
}

void AcrossNodes::exchange(const Tensor& to_send, int to, const Tensor& to_receive, int from) {
  check(ncclGroupStart(), "ncclGroupStart");
  check(ncclSend(to_send.data(), to_send.bytes(), ncclInt8, to, comm_.nccl(), side_.get()),
        "ncclSend");
  check(ncclRecv(to_receive.data(), to_receive.bytes(), ncclInt8, from, comm_.nccl(), side_.get()),
        "ncclRecv");
  check(ncclGroupEnd(), "ncclGroupEnd");
}

void AcrossNodes::gather_chunked(const Tensor& x, const Tensor& weight, const Tensor& out,
                                 const void* bias) {
  const int rank = comm_.rank(), world = comm_.size();
  begun_.record(comm_.stream());  // the last call has read what arrives now
  begun_.block(side_.get());
  for (int step = 1; step < world; ++step) {
    const int from = (rank + step) % world;
    exchange(x, (rank + world - step) % world, rows_of(whole_memory_, shape_.k, from), from);
    moved_[size_t(from)].record(side_.get());
  }
  for (int step = 0; step < world; ++step) {
    const int source = (rank + step) % world;
    const Shard rows = shard(source);
    if (step > 0) moved_[size_t(source)].block(comm_.stream());
    const void* in = step == 0 ? x.data() : rows_of(whole_memory_, shape_.k, source).data();
    shards_[size_t(source)].run(in, weight.data(), out.rows(rows.begin, rows.count).data(), bias,
                                comm_.stream());
  }
}

void AcrossNodes::scatter_chunked(const Tensor& x, const Tensor& weight, const Tensor& out,
                                  const void* bias) {
  const int rank = comm_.rank(), world = comm_.size();
  const int64_t own = shard(rank).count;
  const auto slot = [&](int source) {
    return slots_.view(shape_.dtype, {own * world, shape_.n}).rows(own * source, own);
  };
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  for (int step = 1; step <= world; ++step) {
    const int owner = (rank + step) % world, from = (rank + world - step) % world;
    const Shard rows = shard(owner);
    const Tensor part = rows_of(whole_memory_, shape_.n, owner);
    shards_[size_t(owner)].run(x.rows(rows.begin, rows.count).data(), weight.data(), part.data(),
                               bias, comm_.stream());
    if (owner == rank) break;
    computed_[size_t(owner)].record(comm_.stream());
    computed_[size_t(owner)].block(side_.get());
    exchange(part, owner, slot(from), from);
  }
  moved_[0].record(side_.get());
  moved_[0].block(comm_.stream());
  Parts parts;
  parts.count = world;
  for (int r = 0; r < world; ++r) {
    parts.of[r] = r == rank ? rows_of(whole_memory_, shape_.n, rank).data() : slot(r).data();
  }
  launch_sum(parts, out, comm_.stream());
}

}  // namespace tandem::gpu
