// Arguments of calls: checks before anything is sent, and tensors as contiguous memory.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "queue.h"
#include "text.h"
#include "world.h"

namespace tandem_c10d {

inline void check_tensors(const char* what, const Tensors& tensors) {
  for (const at::Tensor& x : tensors) {
    const bool is_known = x.defined() && (x.device().is_cpu() || x.device().is_cuda());
    TORCH_CHECK_VALUE(is_known && x.layout() == at::kStrided, what, ": a tensor on ",
                      x.defined() ? x.device().str() : "no device",
                      ": expected dense tensors on the CPU or a GPU");
  }
}

/// GPU of a call's tensors; none: they are on the CPU.
inline std::optional<c10::Device> gpu_of(const Tensors& inputs, const Tensors& outputs) {
  std::optional<c10::Device> device;
  for (const Tensors* const tensors : {&inputs, &outputs}) {
    for (const at::Tensor& x : *tensors) {
      if (!device) device = x.device();
      TORCH_CHECK_VALUE(x.device() == *device, "tandem: tensors on ", device->str(), " and ",
                        x.device().str(), ": expected one device");
    }
  }
  return device && device->is_cuda() ? device : std::nullopt;
}

inline void check_count(const char* what, const char* name, size_t count, size_t expected) {
  TORCH_CHECK_VALUE(count == expected, what, ": ", text(count), " ", name, ": expected ",
                    text(expected));
}

/// A list of `expected` tensors.
inline void check_list(const char* what, const char* name, const Tensors& tensors,
                       size_t expected) {
  check_count(what, name, tensors.size(), expected);
  check_tensors(what, tensors);
}

inline void check_root(const char* what, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, what, ": root ", text(root), ": expected 0 to ",
                    text(size - 1));
}

inline void check_like(const char* what, const at::Tensor& x, const at::Tensor& like,
                       int64_t elements) {
  TORCH_CHECK_VALUE(x.scalar_type() == like.scalar_type() && x.numel() == elements, what, ": ",
                    toString(x.scalar_type()), text_of(x.sizes()), ": expected ", text(elements),
                    " elements of ", toString(like.scalar_type()));
}

/// The root's list of a tensor for each rank; empty on other ranks, which pass no list.
inline Tensors list_of_root(const char* what, const char* lists_name, const char* name,
                            const std::vector<Tensors>& lists, bool is_root, int size) {
  check_count(what, lists_name, lists.size(), is_root ? 1 : 0);
  if (!is_root) return {};
  check_list(what, name, lists[0], size_t(size));
  return lists[0];
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

/// All elements of the tensors, one after the other.
inline at::Tensor joined(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& x : tensors) {
    if (x.numel() > 0) all.push_back(flat(x));
  }
  if (all.empty()) return at::empty({0}, tensors[0].options());
  return all.size() == 1 ? all[0] : at::cat(all);
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

/// Sends sent[r] to rank r and receives received[r] from it; empty tensors take no part.
inline void exchange_lists(World& world, const Tensors& sent, const Tensors& received) {
  const std::vector<int64_t> counts = elements_of(received);
  const at::Tensor data = joined(sent);
  const at::Tensor all = at::empty({sum_of(counts)}, received[0].options());
  world.all_to_all(data.data_ptr(), elements_of(sent), all.data_ptr(), counts, all.element_size());
  split_back(all, received);
}

/// `x` for rank `root`, nothing for the others.
inline Tensors list_for(int64_t root, const at::Tensor& x, int size) {
  Tensors list(size_t(size), x.new_empty({0}));
  list[size_t(root)] = x;
  return list;
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
    TORCH_CHECK_VALUE(x.size(0) % size == 0, "all_to_all: ", name, ": ", text(x.size(0)),
                      " rows: expected a multiple of ", text(size));
    return std::vector<int64_t>(size_t(size), x.size(0) / size);
  }
  TORCH_CHECK_VALUE(splits.size() == size_t(size) && sum_of(splits) == x.size(0),
                    "all_to_all: ", name, ": ", text_of(splits), ": expected ", text(size),
                    " numbers whose sum is ", text(x.size(0)));
  return splits;
}

}  // namespace tandem_c10d
