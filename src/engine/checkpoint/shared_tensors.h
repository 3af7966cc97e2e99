// One safetensors file that all ranks write together, each its own parts at their places, so that
// no rank ever holds a whole tensor of another's.
//
// Rank 0 creates the file and completes its header; the hashes of the tensors are computed from the
// file, by all ranks that see it, once everything is written. A rank that does not find under the
// path what rank 0 has made, as on a host with a disk of its own, sends its parts to rank 0, which
// writes them one after the other. However long the disk takes, ranks wait for one another while it
// gets on.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "tandem/communicator.h"

namespace tandem {

class SharedTensors {
 public:
  using Specs = std::vector<SafetensorsWriter::Spec>;  // of f32
  /// Collective. `path` is where this rank sees the file; tensors and metadata are the same on all
  /// ranks. Throws IoError on every rank when rank 0 cannot create it.
  SharedTensors(Communicator& ranks, const std::string& path, const Specs& specs,
                const std::map<std::string, std::string>& metadata = {});
  /// Elements [begin, begin + values.size()) of a tensor.
  using Write = std::function<void(size_t tensor, int64_t begin, std::span<const float> values)>;
  /// Collective. `parts` calls the function that it is given for all parts of this rank; all ranks
  /// together write each element once. Then the file is complete and on disk. Returns its header's
  /// hash, on every rank. Throws IoError on every rank for what went wrong on any.
  std::string fill(const std::function<void(const Write&)>& parts);
  /// Ranks that write through rank 0.
  const std::vector<int>& blind() const { return blind_; }
  /// This rank's, where those that see the file share the work of reading it; none for the others.
  std::optional<Share> share() const;

 private:
  struct Part {
    int64_t tensor, begin, count;
  };
  void write_here(const Part& part, std::span<const float> values);
  void send_part(const Part& part, std::span<const float> values);
  void receive_parts(int source);
  void pass_on_parts(const std::function<void(const Write&)>& parts);
  void share_hashes();

  Communicator& ranks_;
  std::string path_;
  size_t tensors_;
  uint64_t bytes_ = 0;                     ///< of all tensors
  std::optional<SafetensorsWriter> file_;  ///< none where the rank does not see it
  std::vector<int> blind_;
  std::string error_;  ///< of rank 0, with a part that was sent to it
};

}  // namespace tandem
