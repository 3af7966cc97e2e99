// Reads the text of coming microbatches in a background thread, so that it is in memory when their
// step begins. The ranks of a process share one loader, and the processes of a host one that reads:
// tensor-parallel ranks of a replica ask for the same samples, which are read once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "engine/data/sampler.h"
#include "engine/data/text/host_text.h"
#include "tandem/communicator.h"

namespace tandem {

/// Consecutive samples.
class TextBlock {
 public:
  TextBlock(int64_t begin, int64_t count, int64_t seq, bool has_documents);
  /// Returns once the text has been read. Throws its error, on every call.
  void await() const;

  // After `await`.
  std::span<const int32_t> tokens() const { return tokens_; }    ///< [count, seq]
  std::span<const int32_t> targets() const { return targets_; }  ///< [count, seq], as Sampler's
  /// [count, seq], as Sampler's; empty without data.document_mask
  std::span<const int32_t> document_starts() const { return document_starts_; }
  /// Sampler::cursors of the first sample; empty if another process has read it.
  const std::vector<StreamCursor>& cursors() const { return cursors_; }
  uint64_t hash() const {
    return hash_;
  }  ///< sum of sample_hash (engine/data/ledger/ledger_lines.h)

 private:
  friend class Loader;
  void read(const Sampler& sampler, int64_t seq);
  void read(TextClient& client);
  void finish();

  int64_t begin_, count_;
  std::vector<int32_t> tokens_, targets_, document_starts_;
  std::vector<StreamCursor> cursors_;
  uint64_t hash_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> is_done_ = false;
};

class Loader {
 public:
  /// The sampler's text must outlive the loader. It is read by one thread at a time, which in idle
  /// time reads ahead.
  Loader(const Sampler& sampler, int64_t seq);
  /// Has the text read by another process.
  Loader(const Sampler& sampler, int64_t seq, std::unique_ptr<TextClient> client);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Begins to read samples [begin, begin + count), after those of earlier requests, unless a block
  /// of them exists. A block that its requesters have dropped is not read. Any thread may call.
  std::shared_ptr<const TextBlock> request(int64_t begin, int64_t count);
  /// Begins to read for other processes too, retaining the last `retained_blocks` blocks for them.
  /// Throws IoError.
  processes::SharedMemory::Handle serve(const MailboxShape& shape, size_t retained_blocks);

 private:
  void run();

  const Sampler sampler_;
  const int64_t seq_;
  const std::unique_ptr<TextClient> client_;
  std::unique_ptr<TextServer> server_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::weak_ptr<TextBlock>> queue_;
  std::map<std::pair<int64_t, int64_t>, std::weak_ptr<TextBlock>> known_;  // by begin and count
  size_t retained_blocks_ = 0;
  std::deque<std::shared_ptr<TextBlock>> retained_;  // the last ones requested
  bool stop_ = false;
  std::thread thread_;
};

/// Requests of a step's text.
struct LoaderRequests {
  int64_t seq = 0;
  int64_t max_count = 0;  ///< samples of a request
  int64_t of_step = 0;    ///< of all ranks
};

/// The loader of this rank and of all others that are threads of its process and have the same
/// `source` object, the sampler's. The process of a host's first rank reads for its others, unless
/// they cannot map its memory. Collective.
std::shared_ptr<Loader> share_loader(Communicator& world, const TokenSource& source,
                                     const Sampler& sampler, const LoaderRequests& requests);

}  // namespace tandem
