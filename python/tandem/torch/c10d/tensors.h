// Arguments of calls: checks before anything is sent, and tensors as contiguous memory.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "queue.h"
#include "world.h"

namespace tandem_c10d {

inline void check_tensors(const char* what, const Tensors& tensors) {
  for (const at::Tensor& x : tensors) {
    TORCH_CHECK_VALUE(x.defined() && x.device().is_cpu() && x.layout() == at::kStrided, what,
                      ": a tensor on ", x.defined() ? x.device().str() : "no device",
                      ": expected dense tensors on the CPU");
  }
}

inline void check_count(const char* what, const char* name, size_t count, size_t expected) {
  TORCH_CHECK_VALUE(count == expected, what, ": ", count, " ", name, ": expected ", expected);
}

inline void check_root(const char* what, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, what, ": root ", root, ": expected 0 to ", size - 1);
}

inline void check_like(const char* what, const at::Tensor& x, const at::Tensor& like,
                       int64_t elements) {
  TORCH_CHECK_VALUE(x.scalar_type() == like.scalar_type() && x.numel() == elements, what, ": ",
                    toString(x.scalar_type()), x.sizes(), ": expected ", elements, " elements of ",
                    toString(like.scalar_type()));
}

inline at::Tensor flat(const at::Tensor& x) {
  return x.resolve_conj().resolve_neg().contiguous().view({-1});
}

inline void copy_back(const at::Tensor& from, const at::Tensor& to) {
  if (to.is_alias_of(from) && to.data_ptr() == from.data_ptr() && to.is_contiguous()) return;
  to.copy_(from.view(to.sizes()));
}

/// Flat memory for a result, which `copy_back` brings to `x`.
inline at::Tensor flat_result(const at::Tensor& x) {
  return x.is_contiguous() ? x.view({-1}) : at::empty({x.numel()}, x.options());
}

inline std::vector<int64_t> elements_of(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const at::Tensor& x : tensors) counts.push_back(x.numel());
  return counts;
}

inline int64_t sum_of(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return sum;
}

inline Tensors flat_all(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& x : tensors) all.push_back(flat(x));
  return all;
}

/// Copies slices of `flat`, one after the other, to the tensors.
inline void split_back(const at::Tensor& flat, const Tensors& tensors) {
  int64_t at = 0;
  for (const at::Tensor& x : tensors) {
    x.copy_(flat.narrow(0, at, x.numel()).view(x.sizes()));
    at += x.numel();
  }
}

inline void gather_equal(World& world, const at::Tensor& input, const at::Tensor& output) {
  const at::Tensor shard = flat(input), all = flat_result(output);
  world.all_gather(shard.data_ptr(), all.data_ptr(), all.numel(), all.element_size());
  copy_back(all, output);
}

/// Tensors of every rank, which may differ in size.
inline void gather_list(World& world, const at::Tensor& input, const Tensors& outputs) {
  bool is_even = true;
  for (const at::Tensor& x : outputs) is_even &= x.numel() == input.numel();
  if (is_even) {
    const at::Tensor shard = flat(input);
    const at::Tensor all = at::empty({input.numel() * world.size()}, input.options());
    world.all_gather(shard.data_ptr(), all.data_ptr(), all.numel(), all.element_size());
    return split_back(all, outputs);
  }
  for (int rank = 0; rank < world.size(); ++rank) {
    const at::Tensor& output = outputs[size_t(rank)];
    const at::Tensor data = rank == world.rank() ? flat(input) : flat_result(output);
    world.broadcast(data.data_ptr(), data.nbytes(), rank);
    copy_back(data, output);
  }
}

/// Elements for, and from, every rank.
inline void exchange(World& world, const at::Tensor& send, const std::vector<int64_t>& send_counts,
                     const at::Tensor& recv, const std::vector<int64_t>& recv_counts,
                     int64_t row_bytes) {
  world.all_to_all(send.data_ptr(), send_counts, recv.data_ptr(), recv_counts, row_bytes);
}

inline int64_t row_bytes_of(const at::Tensor& x) {
  int64_t elements = 1;
  for (int64_t dim = 1; dim < x.dim(); ++dim) elements *= x.size(dim);
  return elements * x.element_size();
}

inline std::vector<int64_t> row_counts(const char* name, const at::Tensor& x,
                                       const std::vector<int64_t>& splits, int size) {
  TORCH_CHECK_VALUE(x.dim() > 0, "all_to_all: ", name, ": no dimensions: expected rows");
  if (splits.empty()) {
    TORCH_CHECK_VALUE(x.size(0) % size == 0, "all_to_all: ", name, ": ", x.size(0),
                      " rows: expected a multiple of ", size);
    return std::vector<int64_t>(size_t(size), x.size(0) / size);
  }
  TORCH_CHECK_VALUE(splits.size() == size_t(size) && sum_of(splits) == x.size(0),
                    "all_to_all: ", name, ": ", splits, ": expected ", size,
                    " numbers whose sum is ", x.size(0));
  return splits;
}

}  // namespace tandem_c10d
