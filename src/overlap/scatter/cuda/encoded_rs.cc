#include "overlap/scatter/cuda/encoded_rs.h"

namespace tandem::gpu {
namespace {

// Signals of the staging memory.
constexpr int kReady = 0, kArrivedTiles = kMaxGpus;

}  // namespace

std::unique_ptr<EncodedRsKernel> make_encoded_rs_kernel(const Wire& wire,
                                                        const FusedRsShape& shape) {
  if (shape.dtype != DType::bf16 || shape.result != DType::bf16) return nullptr;
  if (wire == Wire{.codec = Codec::int8}) return make_encoded_rs_int8(shape);
  if (wire == Wire{.codec = Codec::int4}) return make_encoded_rs_int4(shape);
  if (wire == Wire{.codec = Codec::int4, .group = 32}) return make_encoded_rs_int4_g32(shape);
  return nullptr;
}

std::unique_ptr<FusedEncoded> EncodedRsOp::make(GpuCommunicator& comm, const OpDesc& desc) {
  const int size = comm.size();
  if (size == 1 || desc.m == 0 || desc.m % (size * FusedRsShape::kRows) != 0 || desc.bias ||
      desc.weight_kn || !has_fused_kernels(comm)) {
    return nullptr;
  }
  const double minimum = -double(desc.k);  // K may differ by rank
  if (-comm.slowest({&minimum, 1})[0] < double(FusedRsShape::kMinK)) return nullptr;
  const FusedRsShape shape{desc.m,      desc.n,     desc.k,       comm.rank(),
                           comm.size(), desc.dtype, desc.result()};
  std::unique_ptr<EncodedRsKernel> kernel = make_encoded_rs_kernel(desc.wire, shape);
  if (!kernel) return nullptr;
  return std::unique_ptr<EncodedRsOp>(new EncodedRsOp(comm, shape, std::move(kernel)));
}

EncodedRsOp::EncodedRsOp(GpuCommunicator& comm, const FusedRsShape& shape,
                         std::unique_ptr<EncodedRsKernel> kernel)
    : comm_(comm), shape_(shape), kernel_(std::move(kernel)), calls_(sizeof(CallCounter)) {
  const int64_t slices = (shape_.ranks - 1) * shape_.slices();
  staging_ = std::static_pointer_cast<GpuBuffer>(
      comm.allocate(size_t(slices) * kernel_->slice_bytes(), kArrivedTiles + int(slices)));
}

void EncodedRsOp::run(bool between, const Operands& o) {
  kernel_->launch(
      {o.x.data(), o.weight.data(), o.out.data(), staging_->table(), kReady, kArrivedTiles,
       reinterpret_cast<CallCounter*>(calls_.data()), between, comm_.device_deadline()},
      comm_.stream());
}

std::vector<Candidate> EncodedRsOp::candidates() {
  std::vector<Candidate> all;
  for (const bool between : {false, true}) {
    if (between && !kernel_->has_between()) continue;
    all.push_back({.name = between ? "fused, local tiles between," : "fused",
                   .form = Strategy::overlapped,
                   .run = [this, between](const Operands& o) { run(between, o); }});
  }
  return all;
}

}  // namespace tandem::gpu
