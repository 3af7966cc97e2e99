#include "overlap/gemm_rs/cuda/gemm_rs.h"

#include <fmt/format.h>

#include "comm/nccl/signal_kernels.h"
#include "kernels/cuda/reduce.h"

namespace tandem::gpu {
namespace {

// Signals of the symmetric buffer, each by source rank.
constexpr int kEntered = 0, kArrived = kMaxGpus, kSignals = 2 * kMaxGpus;

// The bias is added once, by rank 0's product.
GemmShape gemm_shape(const NcclCommunicator& comm, const DenseShape& shape, int64_t rows) {
  return {rows,
          shape.n,
          shape.k,
          shape.dtype,
          shape.dtype,
          shape.weight_is_kn,
          shape.bias && comm.rank() == 0};
}

}  // namespace

GemmRs::GemmRs(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape, Way way)
    : comm_(comm),
      shape_((check_shape(comm, "gemm_rs", shape, true, false), shape)),
      mine_(shard_of(shape.m, comm.size(), comm.rank())),
      whole_(lt, gemm_shape(comm, shape, shape.m)),
      slot_rows_(shard_of(shape.m, comm.size(), 0).count),
      partial_(size_t(shape.m * shape.n) * size_of(shape.dtype)),
      epochs_(2 * sizeof(uint64_t)),
      computed_(size_t(comm.size())),
      way_(way) {
  for (int r = 0; r < comm.size(); ++r) {
    parts_.emplace_back(lt, gemm_shape(comm, shape, shard_of(shape.m, comm.size(), r).count));
  }
  staging_ = std::static_pointer_cast<NcclBuffer>(
      comm.allocate(size_t(slot_rows_ * shape.n * comm.size()) * size_of(shape.dtype), kSignals));
  if (way_ != Way::automatic) return;
  const auto candidates = ways();
  way_ = choose_way(comm, shape, shape.m, mine_.count, candidates,
                    [this](Way w, const Tensor& x, const Tensor& weight, const Tensor& out,
                           const Tensor* bias) { run(w, x, weight, out, bias); });
}

std::vector<Way> GemmRs::ways() const {
  std::vector<Way> all{Way::serial_copy, Way::chunked};
  // NCCL scatters equal shards only.
  if (shape_.m % comm_.size() == 0) all.insert(all.begin(), Way::serial_nccl);
  return all;
}

Tensor GemmRs::part_of(int owner) const {
  const Shard rows = shard_of(shape_.m, comm_.size(), owner);
  return partial_.view(shape_.dtype, {shape_.m, shape_.n}).rows(rows.begin, rows.count);
}

void GemmRs::gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  whole_.run(x.data(), weight.data(), partial_.data(), bias ? bias->data() : nullptr,
             comm_.stream());
}

void GemmRs::run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias) {
  comm_.check_device();
  check_operands(comm_, "gemm_rs", shape_, shape_.m, mine_.count, x, weight, out, bias);
  const void* bias_data = bias ? bias->data() : nullptr;
  const cudaStream_t stream = comm_.stream();
  if (comm_.size() == 1) {
    return whole_.run(x.data(), weight.data(), out.data(), bias_data, stream);
  }
  switch (way) {
    case Way::serial_nccl:
      whole_.run(x.data(), weight.data(), partial_.data(), bias_data, stream);
      return run_nccl(out);
    case Way::serial_copy:
    case Way::chunked:
      break;
    case Way::automatic:
    case Way::fused:
    case Way::one_shot:
    case Way::two_shot:
      throw InvalidArgument(fmt::format(
          "gemm_rs: way {}: expected serial_nccl, serial_copy or chunked", name_of(way)));
  }
  begun_.record(stream);
  begun_.block(side_.get());
  launch_enter(staging_->table(), kEntered, reinterpret_cast<uint64_t*>(epochs_.data()),
               comm_.watch(), OpId::gemm_rs, side_.get());
  if (way == Way::serial_copy) {
    whole_.run(x.data(), weight.data(), partial_.data(), bias_data, stream);
  }
  for (int step = 1; step <= comm_.size(); ++step) {
    const int owner = (comm_.rank() + step) % comm_.size();
    const Shard rows = shard_of(shape_.m, comm_.size(), owner);
    if (way == Way::chunked) {
      parts_[size_t(owner)].run(x.rows(rows.begin, rows.count).data(), weight.data(),
                                part_of(owner).data(), bias_data, stream);
    }
    if (owner != comm_.rank()) push_part(owner);
  }
  pushed_.record(side_.get());
  sum_parts(out);
  pushed_.block(stream);
}

void GemmRs::push_part(int owner) {
  const Tensor part = part_of(owner);
  const PeerTable& table = staging_->table();
  Event& computed = computed_[size_t(owner)];
  computed.record(comm_.stream());
  computed.block(side_.get());
  const size_t slot = size_t(comm_.rank() * slot_rows_ * shape_.n) * size_of(shape_.dtype);
  check(cudaMemcpyAsync(table.memory[owner] + slot, part.data(), part.bytes(), cudaMemcpyDefault,
                        side_.get()),
        "push a part");
  check(cudaMemcpyAsync(table.signals[owner] + kArrived + comm_.rank(), epochs_.data(),
                        sizeof(uint64_t), cudaMemcpyDefault, side_.get()),
        "signal a part");
}

void GemmRs::sum_parts(const Tensor& out) {
  launch_wait(staging_->table(), kArrived, -1, reinterpret_cast<uint64_t*>(epochs_.data()) + 1,
              true, comm_.watch(), OpId::gemm_rs, comm_.stream());
  Parts parts;
  parts.count = comm_.size();
  for (int r = 0; r < comm_.size(); ++r) {
    const size_t slot = size_t(r * slot_rows_ * shape_.n) * size_of(shape_.dtype);
    parts.of[r] = r == comm_.rank() ? part_of(r).data() : staging_->local() + slot;
  }
  launch_sum(parts, out, comm_.stream());
}

void GemmRs::run_nccl(const Tensor& out) {
  const ncclDataType_t type = shape_.dtype == DType::f32   ? ncclFloat32
                              : shape_.dtype == DType::f16 ? ncclFloat16
                                                           : ncclBfloat16;
  check(ncclReduceScatter(partial_.data(), out.data(), size_t(out.elements()), type, ncclSum,
                          comm_.nccl(), comm_.stream()),
        "ncclReduceScatter");
}

}  // namespace tandem::gpu
