// GPU half of the toy operator. The copy engine pushes shards to the peers; `chunked` scales each
// shard when it has arrived.
#include <cuda_bf16.h>

#include "core/cuda/load_module.cuh"
#include "overlap/contract/cuda/gpu_operator.h"
#include "overlap/gather/cuda/multi_node.h"
#include "overlap/gather/cuda/shard_pushes.h"
#include "tests/seams/gather_scale.h"

namespace tandem::gpu {
namespace {

constexpr OpId kGatherScaleWait{15};
[[maybe_unused]] const WaitNames kGatherScaleWaits{{kGatherScaleWait, "gather_scale"}};

template <typename T>
__global__ void scale_kernel(const T* x, const T* factor, T* out, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    out[i] = T(float(*factor) * float(x[i]));
  }
}

template <typename T>
void launch_scale(const void* x, const Tensor& factor, const Tensor& out, cudaStream_t stream) {
  if (out.elements() == 0) return;
  scale_kernel<<<16, 256, 0, stream>>>(static_cast<const T*>(x), factor.as<const T>(), out.as<T>(),
                                       out.elements());
  check(cudaGetLastError(), "gather_scale");
}

class GatherScale {
 public:
  GatherScale(GpuCommunicator& comm, const LtContext&, const OpDesc& desc)
      : comm_(comm), pushes_(comm, kGatherScaleWait, desc.m, desc.k, desc.dtype, false) {
    comm.require_same(desc.op, agreement(desc));
  }
  std::vector<Candidate> candidates() {
    return {{.name = std::string(kNccl),
             .form = Strategy::serial,
             .run = as_call(comm_,
                            [this](const Operands& o) {
                              scale(pushes_.gather_by_nccl(o.x), o.weight, o.out);
                            })},
            {.name = "chunked",
             .form = Strategy::overlapped,
             .run = as_call(comm_, [this](const Operands& o) {
               pushes_.for_each_shard(o.x, nullptr, [&](int, const Shard& rows, const void* shard) {
                 scale(shard, o.weight, o.out.rows(rows.begin, rows.count));
               });
             })}};
  }

 private:
  void scale(const void* x, const Tensor& factor, const Tensor& out) const {
    const auto launch =
        out.dtype() == DType::f32 ? launch_scale<float> : launch_scale<__nv_bfloat16>;
    launch(x, factor, out, comm_.stream());
  }

  GpuCommunicator& comm_;
  ShardPushes pushes_;
};

}  // namespace
}  // namespace tandem::gpu

namespace tandem::test {

std::unique_ptr<OverlapOperator> gather_scale_on_gpu(Communicator& comm, const OpDesc& desc,
                                                     const OverlapOptions& options) {
  return gpu::make_gpu_operator<gpu::GatherScale>(comm, desc, options, {gpu::make_across_nodes});
}

}  // namespace tandem::test
