#include "comm/threads/each_rank.h"

#include <fmt/format.h>

#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "tandem/error.h"

namespace tandem::threads {
namespace {

/// First error of the ranks; an Aborted is replaced by the first original error.
class FirstError {
 public:
  void keep(std::exception_ptr error, bool original) {
    const std::lock_guard lock(mutex_);
    if (error_ && (original_ || !original)) return;
    error_ = std::move(error);
    original_ = original;
  }
  std::exception_ptr get() const { return error_; }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  bool original_ = false;
};

/// Throws if there is no memory for a thread's own objects: where the C library cannot register
/// their destructors, it ends the process.
void require_room_for_locals() {
  constexpr size_t kRoom = 4096;
  ::operator delete(::operator new(kRoom));
}

}  // namespace

std::exception_ptr run_each_rank(
    int ranks, const std::function<void(int rank)>& body,
    const std::function<void(int rank, const std::string& reason)>& abort) {
  FirstError first;
  const auto run = [&](int rank) {
    try {
      require_room_for_locals();
      body(rank);
    } catch (const Aborted& error) {
      first.keep(std::current_exception(), false);
      abort(rank, error.what());
    } catch (const std::exception& error) {
      first.keep(std::current_exception(), true);
      abort(rank, error.what());
    } catch (...) {
      first.keep(std::current_exception(), true);
      abort(rank, "unknown exception");
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&run, rank] { run(rank); });
      }
    } catch (const std::system_error& error) {
      const std::string reason = fmt::format("ranks {}: could start only {} threads: {}", ranks,
                                             threads.size(), error.what());
      first.keep(std::make_exception_ptr(Unsupported(reason)), true);
      abort(-1, reason);
    } catch (const std::bad_alloc& error) {
      first.keep(std::current_exception(), true);
      abort(-1, error.what());
    }
  }
  return first.get();
}

}  // namespace tandem::threads
