// Sums of sparse tensors over CPU ranks, as of gradients of sparse embeddings.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "reduce.h"
#include "tensors.h"
#include "world.h"

namespace tandem_c10d {

inline void check_sparse_sum(const Tensors& tensors, c10d::ReduceOp::RedOpType op) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].device().is_cpu(),
                    "all_reduce: sparse tensors: expected one, on the CPU");
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM, "all_reduce: ", name_of(op),
                    " of a sparse tensor: expected SUM");
}

/// Matrices of every rank, which differ in their size along `dim`, joined along it.
inline at::Tensor joined_along(int64_t dim, World& world, const at::Tensor& shard,
                               const std::vector<int64_t>& sizes) {
  Tensors shards;
  for (const int64_t size : sizes) {
    std::vector<int64_t> shape = shard.sizes().vec();
    shape[size_t(dim)] = size;
    shards.push_back(at::empty(shape, shard.options()));
  }
  gather_list(world, shard.contiguous(), shards);
  return at::cat(shards, dim);
}

/// Replaces `x` by the sum over ranks. Entries of one place are added in the order of the ranks.
inline void sum_sparse(World& world, const at::Tensor& x) {
  const at::Tensor local = x.coalesce();
  const int64_t count = local._nnz();
  std::vector<int64_t> counts(static_cast<size_t>(world.size()));
  world.all_gather(&count, counts.data(), world.size(), sizeof count);
  const at::Tensor positions = joined_along(1, world, local.indices(), counts);
  const at::Tensor values = joined_along(0, world, local.values(), counts);
  x.copy_(at::_sparse_coo_tensor_unsafe(positions, values, x.sizes()).coalesce());
}

}  // namespace tandem_c10d
