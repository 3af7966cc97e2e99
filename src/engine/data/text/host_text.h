// Text that one process of a host reads for the others. Each of these has a mailbox in shared
// memory: it posts one request at a time, and the reader answers with the text or an error. Neither
// waits for one that has died.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "comm/processes/shared/shared_memory.h"

namespace tandem {

/// Views of a request's text, in memory of whoever is asked for it; as TextBlock's.
struct TextView {
  std::span<int32_t> tokens, targets, document_starts;
  uint64_t* hash;
};

struct MailboxShape {
  int mailboxes = 0;
  int64_t max_count = 0;  ///< samples of a request
  int64_t seq = 0;
  bool has_documents = false;
};

/// Answers the requests, in a thread of its own.
class TextServer {
 public:
  /// `read(begin, count, text)` fills `text`, which has the size of the request, or throws IoError.
  using Read = std::function<void(int64_t begin, int64_t count, const TextView& text)>;
  TextServer(MailboxShape shape, Read read);
  /// Requests that are not answered, and later ones, fail.
  ~TextServer();
  TextServer(const TextServer&) = delete;
  TextServer& operator=(const TextServer&) = delete;
  processes::SharedMemory::Handle handle() const { return memory_->handle(); }

 private:
  void run();

  MailboxShape shape_;
  Read read_;
  std::shared_ptr<processes::SharedMemory> memory_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

/// Asks the server of another process.
class TextClient {
 public:
  /// `mailbox`: of this process only. `deadline_s`: of a request. Throws IoError.
  TextClient(MailboxShape shape, int mailbox, processes::SharedMemory::Handle handle,
             double deadline_s);
  ~TextClient();
  TextClient(const TextClient&) = delete;
  TextClient& operator=(const TextClient&) = delete;
  /// By one thread at a time. Throws IoError: the server's, or if its process has ended, or if it
  /// does not answer within the deadline.
  void read(int64_t begin, int64_t count, const TextView& text);
  /// Ends a read of another thread, and all later ones.
  void stop();

 private:
  MailboxShape shape_;
  int mailbox_;
  double deadline_s_;
  std::shared_ptr<processes::SharedMemory> memory_;
  int process_;  // pidfd of the server's
  std::atomic<bool> stop_ = false;
};

}  // namespace tandem
