// Table `parallel`: ranks of each axis, pipeline, and what is sent how.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct ParallelConfig {
  int64_t tp = 1;
  int64_t dp = 1;
  int64_t replicas = 0;  ///< 0: dp (replicas.h)
  int64_t dp_shard = 0;  ///< 0: dp
  int64_t dp_host = 0;   ///< 0: dp
  int64_t ep = 1;
  int64_t zero = 1;
  int64_t pp = 1;
  int64_t virtual_stages = 1;
  std::string schedule = "1f1b";          ///< a schedule::PipelineKind
  std::vector<int64_t> layers_per_stage;  ///< by stage; empty: equal shares
  double dp_bucket_mib = 0;               ///< 0: chosen (bucket_mib)
  std::string strategy = "automatic";
  int64_t chunks = 0;
  std::string link;
  std::string codec = "none";  ///< a CodecPolicy
  bool error_feedback = true;

  static std::span<const Key<ParallelConfig>> keys();
};

}  // namespace tandem
