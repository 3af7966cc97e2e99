// Calls of a process group: each runs on the group's thread, in the order of the calls, so that
// collectives overlap computation and several groups never wait for each other's calls.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tandem_c10d {

using Tensors = std::vector<at::Tensor>;

class CallWork : public c10d::Work {
 public:
  CallWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs, Tensors outputs,
           uint64_t number)
      : Work(rank, type, title, inputs),
        title_(title),
        outputs_(std::move(outputs)),
        number_(number),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ended = [&] { return completed_; };
    if (timeout <= kNoTimeout) {
      cv_.wait(lock, ended);
    } else if (!cv_.wait_for(lock, timeout, ended)) {
      C10_THROW_ERROR(DistBackendError,
                      title_ + ": has not ended within " + std::to_string(timeout.count()) + " ms");
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return number_; }

  int sourceRank() const override { return source_; }
  void set_source(int rank) { source_ = rank; }

  /// Ends the work; `error` may be null.
  void end(std::exception_ptr error) {
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      future_->markCompleted(c10::IValue(outputs_));
    }
    finish(std::move(error));
  }

 private:
  const std::string title_;
  const Tensors outputs_;
  const uint64_t number_;
  std::atomic<int> source_ = -1;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class CallQueue {
 public:
  /// `prepare` runs first, on the thread.
  explicit CallQueue(std::function<void()> prepare)
      : thread_([this, prepare = std::move(prepare)] {
          prepare();
          run();
        }) {}
  ~CallQueue() { close(); }

  void push(c10::intrusive_ptr<CallWork> work, std::function<void()> call) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!ends_, "tandem: the process group was destroyed: expected an open one");
      calls_.emplace_back(std::move(work), std::move(call));
    }
    changed_.notify_one();
  }
  /// Returns once all calls have ended. The caller does not hold the GIL.
  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    const at::AutoDispatchBelowADInplaceOrView raw;  // no gradients, no version counts
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !calls_.empty(); });
      if (calls_.empty()) return;
      auto [work, call] = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      std::exception_ptr error;
      try {
        call();
      } catch (...) {
        error = std::current_exception();
      }
      call = nullptr;  // its tensors
      work->end(error);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<c10::intrusive_ptr<CallWork>, std::function<void()>>> calls_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace tandem_c10d
