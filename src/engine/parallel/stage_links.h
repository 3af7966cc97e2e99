// Messages of one size between pipeline ranks, through slots of a symmetric buffer.
//
// A slot is memory that the receiver's pass reads, or writes to, until it acknowledges the message:
// arrived messages are not copied. Receiving thus never blocks the sender. GPU ranks send by copy
// engines after the work enqueued before, and enqueue their waits, except in the first run: memory
// is allocated and kernels are loaded then, which waits for running kernels, and on a GPU that
// ranks share one of these may wait for this rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/exec.h"
#include "engine/model/views.h"
#include "observe/recorder.h"
#include "tandem/codec.h"
#include "tandem/communicator.h"

namespace tandem {

class StageLinks {
 public:
  /// From one stage to another. Messages are numbered consecutively from 0.
  struct Channel {
    int source = 0, destination = 0;  ///< ranks
    int slots = 1;                    ///< messages that can be sent and not acknowledged yet
    const char* op = "";              ///< name in errors and spans
    /// Messages are copied before they are sent; else they stay unchanged until they are
    /// acknowledged. Messages in a wire format are encoded anyway.
    bool is_copied = true;
  };

  /// `message`: shape, f32, and device of a message. The channels are the same on all ranks.
  /// Collective over `pp`, whose calls are enqueued on exec's stream from now on. Throws
  /// Unsupported if a GPU does not reach the memory of one that it sends to.
  StageLinks(Communicator& pp, const Exec& exec, std::vector<Channel> channels,
             const Tensor& message, const Wire& wire);
  /// Waits until the messages sent have been copied; on GPUs also for the work enqueued before
  /// them.
  ~StageLinks();
  StageLinks(const StageLinks&) = delete;
  StageLinks& operator=(const StageLinks&) = delete;

  void send(int channel, uint64_t number, const Tensor& message);
  /// Waits for a message, which may be written to and stays valid until it is acknowledged.
  Tensor receive(int channel, uint64_t number);
  /// After the work enqueued so far.
  void acknowledge(int channel, uint64_t number);
  /// Ends a run. GPU ranks wait for their messages, and so for all work before them: throws Timeout
  /// or Aborted if a wait that was enqueued has ended without its message.
  void end_run();
  /// Whether waits are the host's, and so timed: of CPU ranks.
  bool times_waits() const { return !is_enqueued_; }
  /// Seconds of this rank's waits, without those that GPUs wait themselves.
  double waited_s() const { return waited_s_; }
  /// Bytes of all messages that this rank has sent.
  uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Slots {
    size_t offset = 0;        ///< of the first slot, on the destination
    int arrival = 0;          ///< signal of the first slot, on the destination
    int acknowledgement = 0;  ///< likewise, on the source
    Memory sent;              ///< on the source, if messages are copied or encoded
    Memory decoded;           ///< on the destination, if they are encoded
  };
  Tensor as_message(void* values) const;
  void wait(int signal, uint64_t epoch, const WaitSite& site, const char* op, const SpanPeer& peer);

  Communicator& pp_;
  const Exec exec_;
  const std::vector<Channel> channels_;
  const int64_t rows_, columns_;
  const Wire wire_;
  const size_t message_bytes_, slot_bytes_;
  /// Number of a channel's message among those of all channels, for arrows of a trace.
  int64_t message_of(const Channel& channel, uint64_t number) const {
    return int64_t(number * channels_.size()) + (&channel - channels_.data());
  }

  std::vector<Slots> slots_;  // by channel
  const uint32_t stream_;     // of messages in a trace
  const bool is_enqueued_;    // GPUs
  std::shared_ptr<SymmetricBuffer> buffer_;
  bool host_waits_ = true;
  double waited_s_ = 0;
  uint64_t sent_bytes_ = 0;
};

}  // namespace tandem
