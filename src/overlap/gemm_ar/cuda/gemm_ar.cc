#include "overlap/gemm_ar/cuda/gemm_ar.h"

#include <fmt/format.h>

#include <optional>

#include "kernels/cuda/add_norm.h"

namespace tandem::gpu {
namespace {

// The bias is added once, by rank 0's product.
GemmShape gemm_shape(const NcclCommunicator& comm, const DenseShape& shape) {
  return shape.product(shape.m, shape.bias && comm.rank() == 0);
}

AllReduceWay all_reduce_way(Way way) {
  switch (way) {
    case Way::serial_nccl:
      return AllReduceWay::nccl;
    case Way::one_shot:
      return AllReduceWay::one_shot;
    case Way::two_shot:
      return AllReduceWay::two_shot;
    case Way::automatic:
    case Way::serial_copy:
    case Way::chunked:
    case Way::fused:
      break;
  }
  throw InvalidArgument(
      fmt::format("gemm_ar: way {}: expected serial_nccl, one_shot or two_shot", name_of(way)));
}

}  // namespace

GemmAr::GemmAr(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape, Way way)
    : comm_(comm),
      shape_((check_shape(comm, "gemm_ar", shape, true, false), shape)),
      whole_(lt, gemm_shape(comm, shape)),
      partial_(size_t(shape.m * shape.n) * size_of(shape.result())),
      all_reduce_(comm, shape.m * shape.n, shape.result(), shape.add_norm ? shape.n : 0),
      way_(way) {
  if (way_ != Way::automatic) return;
  std::optional<AddNormScratch> tail;
  if (shape.add_norm) tail.emplace(Extent{shape.result(), shape.m, shape.n});
  way_ = choose_way(comm, "gemm_ar", shape, shape.m, shape.m, ways(),
                    [&](Way w, const Tensor& x, const Tensor& weight, const Tensor& out,
                        const Tensor* bias, const Scales* scales) {
                      run(w, x, weight, out, bias, scales, tail ? &tail->add_norm : nullptr);
                    });
}

std::vector<Way> GemmAr::ways() const {
  std::vector<Way> all{Way::serial_nccl};
  const int64_t elements = shape_.m * shape_.n, row = shape_.add_norm ? shape_.n : 0;
  if (comm_.size() > 1 && all_reduce_.fits(elements, AllReduceWay::one_shot, row)) {
    all.push_back(Way::one_shot);
  }
  if (comm_.size() > 1 && all_reduce_.fits(elements, AllReduceWay::two_shot, row)) {
    all.push_back(Way::two_shot);
  }
  return all;
}

void GemmAr::gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias,
                       const Scales* scales) {
  whole_.run(x.data(), weight.data(), partial_.data(), bias ? bias->data() : nullptr,
             comm_.stream(), shape_.pointers(scales));
}

void GemmAr::run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias, const Scales* scales, const AddNorm* add_norm) {
  comm_.check_device();
  check_operands(comm_, "gemm_ar", shape_, shape_.m, shape_.m, x, weight, out, bias, scales);
  check_add_norm_operands(comm_, "gemm_ar", shape_, add_norm, out);
  const AllReduceWay reduce = all_reduce_way(way);
  if (comm_.size() == 1) {
    whole_.run(x.data(), weight.data(), out.data(), bias ? bias->data() : nullptr, comm_.stream(),
               shape_.pointers(scales));
    if (add_norm) launch_add_norm(out, *add_norm, out, comm_.stream());
    return;
  }
  gemm_only(x, weight, bias, scales);
  const Tensor partial = partial_.view(shape_.result(), {shape_.m, shape_.n});
  if (add_norm) return all_reduce_.run(partial, out, reduce, *add_norm);
  all_reduce_.run(partial, out, reduce);
}

}  // namespace tandem::gpu
