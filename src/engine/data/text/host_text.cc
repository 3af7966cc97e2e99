#include "engine/data/text/host_text.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "comm/processes/shared/futex_waiter.h"
#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using processes::FutexWaiter;
using processes::SharedMemory;
using HostClock = FutexWaiter::Clock;
constexpr size_t kMaxError = 4096;
constexpr auto kCheckEvery = std::chrono::milliseconds(100);

/// At the begin of the shared memory, which is zero-filled at first.
struct MailboxHeader {
  FutexWaiter requests, answers;
  std::atomic<uint32_t> closed{0};
};

/// Followed by its text.
struct Mailbox {
  std::atomic<uint64_t> requested{0}, answered{0};  // numbers of the last ones
  int64_t begin = 0, count = 0;                     // written by the client
  uint64_t hash = 0;                                // by the server, as what follows
  uint64_t error_bytes = 0;                         // 0: there is a text
  char error[kMaxError] = {};
};

size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

size_t text_elements(const MailboxShape& shape) {
  return size_t(shape.max_count * shape.seq);
}

size_t mailbox_bytes(const MailboxShape& shape) {
  const size_t texts = shape.has_documents ? 3 : 2;
  return aligned(sizeof(Mailbox)) + aligned(texts * text_elements(shape) * sizeof(int32_t));
}

size_t memory_bytes(const MailboxShape& shape) {
  return aligned(sizeof(MailboxHeader)) + size_t(shape.mailboxes) * mailbox_bytes(shape);
}

MailboxHeader& header_of(const SharedMemory& memory) {
  return *std::launder(reinterpret_cast<MailboxHeader*>(memory.data()));
}

std::byte* mailbox_address(const SharedMemory& memory, const MailboxShape& shape, int index) {
  return memory.data() + aligned(sizeof(MailboxHeader)) + size_t(index) * mailbox_bytes(shape);
}

Mailbox& mailbox_of(const SharedMemory& memory, const MailboxShape& shape, int index) {
  return *std::launder(reinterpret_cast<Mailbox*>(mailbox_address(memory, shape, index)));
}

/// Text of `count` samples in the mailbox.
TextView text_of(const SharedMemory& memory, const MailboxShape& shape, int index, int64_t count) {
  auto* const at =
      reinterpret_cast<int32_t*>(mailbox_address(memory, shape, index) + aligned(sizeof(Mailbox)));
  const auto elements = size_t(count * shape.seq), all = text_elements(shape);
  return {{at, elements},
          {at + all, elements},
          {at + 2 * all, shape.has_documents ? elements : 0},
          &mailbox_of(memory, shape, index).hash};
}

void answer(const SharedMemory& memory, const MailboxShape& shape, int index,
            const TextServer::Read& read) {
  Mailbox& mailbox = mailbox_of(memory, shape, index);
  std::string error;
  try {
    if (mailbox.count < 1 || mailbox.count > shape.max_count) {
      throw IoError(
          fmt::format("a request of {} samples: expected 1 to {}", mailbox.count, shape.max_count));
    }
    read(mailbox.begin, mailbox.count, text_of(memory, shape, index, mailbox.count));
  } catch (const std::exception& failed) {
    error = failed.what();
    if (error.empty()) error = "the text cannot be read";
  }
  mailbox.error_bytes = std::min(error.size(), kMaxError);
  std::memcpy(mailbox.error, error.data(), mailbox.error_bytes);
  mailbox.answered.store(mailbox.requested.load(), std::memory_order_release);
  header_of(memory).answers.ring();
}

}  // namespace

TextServer::TextServer(MailboxShape shape, Read read)
    : shape_(shape), read_(std::move(read)), memory_(SharedMemory::create(memory_bytes(shape))) {
  new (memory_->data()) MailboxHeader;
  for (int i = 0; i < shape_.mailboxes; ++i) {
    new (mailbox_address(*memory_, shape_, i)) Mailbox;
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& failed) {
    throw IoError(fmt::format("no memory for the thread that sends text: {}", failed.what()));
  }
}

TextServer::~TextServer() {
  stop_ = true;
  header_of(*memory_).requests.ring();
  thread_.join();
  header_of(*memory_).closed = 1;
  header_of(*memory_).answers.ring();
}

void TextServer::run() {
  const auto is_open = [&](int index) {
    const Mailbox& mailbox = mailbox_of(*memory_, shape_, index);
    return mailbox.requested.load(std::memory_order_acquire) != mailbox.answered.load();
  };
  const auto has_work = [&] {
    for (int i = 0; i < shape_.mailboxes; ++i) {
      if (is_open(i)) return true;
    }
    return stop_.load();
  };
  while (!stop_) {
    header_of(*memory_).requests.wait(has_work, HostClock::now() + std::chrono::seconds(1), 0);
    for (int i = 0; i < shape_.mailboxes && !stop_; ++i) {
      if (is_open(i)) answer(*memory_, shape_, i, read_);
    }
  }
}

TextClient::TextClient(MailboxShape shape, int mailbox, SharedMemory::Handle handle,
                       double deadline_s)
    : shape_(shape),
      mailbox_(mailbox),
      deadline_s_(deadline_s),
      memory_(SharedMemory::open(handle, memory_bytes(shape))),
      process_(int(::syscall(SYS_pidfd_open, handle.pid, 0))) {
  if (process_ < 0) throw_errno(fmt::format("process {}", handle.pid), "cannot be watched");
}

TextClient::~TextClient() {
  ::close(process_);
}

void TextClient::stop() {
  stop_ = true;
  header_of(*memory_).answers.ring();
}

void TextClient::read(int64_t begin, int64_t count, const TextView& text) {
  MailboxHeader& header = header_of(*memory_);
  Mailbox& mailbox = mailbox_of(*memory_, shape_, mailbox_);
  if (mailbox.requested.load() != mailbox.answered.load(std::memory_order_acquire)) {
    throw IoError("an earlier request for text has not been answered");
  }
  mailbox.begin = begin;
  mailbox.count = count;
  const uint64_t number = mailbox.requested.load() + 1;
  mailbox.requested.store(number, std::memory_order_release);
  header.requests.ring();
  const auto is_answered = [&] {
    return mailbox.answered.load(std::memory_order_acquire) == number;
  };
  const auto is_over = [&] { return is_answered() || header.closed.load() != 0 || stop_.load(); };
  const auto deadline = HostClock::now() + std::chrono::duration_cast<HostClock::duration>(
                                               std::chrono::duration<double>(deadline_s_));
  while (!header.answers.wait(is_over, std::min(deadline, HostClock::now() + kCheckEvery), 0)) {
    pollfd process{process_, POLLIN, 0};
    if (::poll(&process, 1, 0) > 0) throw IoError("the process that reads the text has ended");
    if (HostClock::now() < deadline) continue;
    throw IoError(
        fmt::format("the process that reads the text has not sent samples {} to {} for "
                    "{:g} s",
                    begin, begin + count - 1, deadline_s_));
  }
  if (!is_answered()) throw IoError("the process that reads the text has stopped reading");
  if (mailbox.error_bytes > 0) throw IoError(std::string(mailbox.error, mailbox.error_bytes));
  const TextView found = text_of(*memory_, shape_, mailbox_, count);
  std::ranges::copy(found.tokens, text.tokens.begin());
  std::ranges::copy(found.targets, text.targets.begin());
  if (shape_.has_documents) std::ranges::copy(found.document_starts, text.document_starts.begin());
  *text.hash = mailbox.hash;
}

}  // namespace tandem
