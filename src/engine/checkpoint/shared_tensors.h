// Safetensors file written by all ranks together, each its shards at their offsets, so that no rank
// ever holds another rank's full tensor.
//
// Rank 0 creates the file and completes its header; all ranks that see the file compute the
// tensors' hashes from it once everything is written: on one host from memory, while the disk still
// writes it. A rank that does not find rank 0's file at
// the path, as on a host with its own disk, sends its parts to rank 0, which writes them
// sequentially. Ranks wait for one another as long as the disk makes progress.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

class SharedTensors {
 public:
  using Specs = std::vector<SafetensorsWriter::Spec>;  // f32 or bf16 tensors
  /// `path` is the file's path on this rank; tensors and metadata are the same on all ranks. Throws
  /// IoError on every rank if rank 0 cannot create it. Collective.
  SharedTensors(Communicator& ranks, const std::string& path, const Specs& specs,
                const std::map<std::string, std::string>& metadata = {});
  /// Writes elements of a tensor from `begin` on, rounded to its dtype. `values`: f32 on the host.
  using Write = std::function<void(size_t tensor, int64_t begin, const Tensor& values)>;
  /// Writes the file, which need not be on disk before `sync`. `for_each_slice` calls its argument
  /// for all parts of this rank; all ranks together write each element once. Returns the header's
  /// hash, on every rank. Throws IoError on every rank for an error on any. Collective.
  std::string fill(const std::function<void(const Write&)>& for_each_slice);
  /// Waits until the file is on disk. Throws IoError on every rank. Collective.
  void sync();
  /// Ranks that write through rank 0.
  const std::vector<int>& ranks_without_path() const { return ranks_without_path_; }
  /// This rank's share of the reading work among the ranks that see the file; nullopt for the
  /// others.
  std::optional<Share> share() const;

 private:
  struct Slice {
    int64_t tensor, begin, count;
  };
  void write_here(const Slice& slice, const Tensor& values);
  void send_slice(const Slice& slice, const Tensor& values);
  void receive_slices(int source);
  void forward_slices(const std::function<void(const Write&)>& for_each_slice);
  void share_hashes();

  Communicator& ranks_;
  std::string path_;
  size_t tensors_;
  std::vector<DType> dtypes_;              ///< of the tensors
  uint64_t bytes_ = 0;                     ///< total of all tensors
  std::optional<SafetensorsWriter> file_;  ///< nullopt if this rank does not see the file
  std::vector<int> ranks_without_path_;
  bool has_several_hosts_ = false;  ///< of the ranks that see the file
  std::string error_;               ///< on rank 0, for a part sent to it
};

}  // namespace tandem
