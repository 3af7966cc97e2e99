// Thread of `tandem launch` that watches a training's records for ranks that are slow for a while.
// The launcher does not wait for it: the files may be on a file system that hangs.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/report/ranks/slow_watch.h"

namespace tandem {

class SlowRanks {
 public:
  /// `out`: --out of the training.
  explicit SlowRanks(const std::string& out);
  ~SlowRanks();
  SlowRanks(const SlowRanks&) = delete;
  SlowRanks& operator=(const SlowRanks&) = delete;

  /// Ranks found since the last call.
  std::vector<report::SlowRank> take();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace tandem
