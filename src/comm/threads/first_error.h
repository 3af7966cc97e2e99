// What a world of thread-ranks says when it fails: the first error, an Aborted only until an
// original one comes.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

namespace tandem::threads {

class FirstError {
 public:
  void keep(std::exception_ptr error, bool original) {
    const std::lock_guard lock(mutex_);
    if (error_ && (original_ || !original)) return;
    error_ = std::move(error);
    original_ = original;
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  bool original_ = false;
};

}  // namespace tandem::threads
