// Functions of tandem._core that the torch.distributed backend calls: plain C, so that the backend,
// which the user's compiler builds against the user's PyTorch, shares no C++ library or class with
// it. Passed in a capsule named kTandemTableName.
#pragma once

#include <stdint.h>

#define kTandemTableName "tandem.backend_table"
#define kTandemTableVersion 2

extern "C" {

enum TandemErrorKind {
  kTandemNone,
  kTandemInvalid,   // an argument, before anything was sent; also Mismatch
  kTandemTimeout,   // a rank has not come within the deadline
  kTandemAborted,   // a rank has died or failed
  kTandemInternal,  // any other error
};
struct TandemError {
  int kind;
  char text[1500];  // one line
};

enum TandemDType { kTandemF32, kTandemBf16, kTandemF16, kTandemI32, kTandemBytes };
enum TandemOp { kTandemSum, kTandemMax };

/// Ranks of a process group, one of them this process's. Calls come from one thread at a time,
/// except `abort` and those for messages.
struct TandemWorld;

/// Gathers `bytes` bytes of every rank into `all`, by rank. Returns false if it failed.
typedef bool (*TandemGather)(void* context, const void* local, uint64_t bytes, void* all);
/// Called once, on another thread, when a message has ended. `error`: null if it has arrived or its
/// memory may be written again. `source`: sending rank, -1 if it failed before one was known.
typedef void (*TandemDone)(void* context, const struct TandemError* error, int source);

struct TandemWorldArguments {
  int rank, size;
  double deadline_s;
  const char* wire;         // wire format of encoded sums; empty: none
  bool allow_uncompressed;  // only if it is faster
  TandemGather gather;
  void* context;
  bool on_gpu;   // ranks are GPUs: the one that is current
  void* stream;  // of its calls: a cudaStream_t; null on the CPU
};

enum { kTandemAnyPeer = -1 };  // receives from any rank
struct TandemMessage {
  int peer;
  int64_t tag;
  void* data;
  uint64_t bytes;
  bool sends;
  double deadline_s;
  TandemDone done;
  void* context;
};

/// Message of a GPU rank, without a tag.
struct TandemGpuMessage {
  int peer;
  void* data;
  uint64_t bytes;
  bool sends;
};

/// Memory is the GPU's if the ranks are GPUs: then calls are enqueued on their stream, and fail if
/// an earlier one has failed on the GPU.
///
/// All are collective, except `close`, `abort`, `set_deadline`, `bytes_sent`, `post`,
/// `exchange`, `check` and `synchronize`, and return false with *error set if they fail. Rows are
/// shards of shard_of(rows, size, rank).
struct TandemTable {
  int version;
  struct TandemWorld* (*connect)(const struct TandemWorldArguments*, struct TandemError*);
  /// Ends messages that have not ended with kTandemAborted.
  void (*close)(struct TandemWorld*);
  /// Ends the calls of all ranks. Any thread.
  void (*abort)(struct TandemWorld*, const char* reason);
  void (*set_deadline)(struct TandemWorld*, double seconds);
  uint64_t (*bytes_sent)(struct TandemWorld*);
  /// Sets the number of threads that kernels called from this thread use.
  void (*share_processors)(int ranks);
  /// Fails on every rank, naming `what` and two ranks' values, unless all have the same.
  bool (*require_same)(struct TandemWorld*, const char* what, const char* value,
                       struct TandemError*);
  bool (*barrier)(struct TandemWorld*, struct TandemError*);
  /// In place. `encoded`: over the world's wire format.
  bool (*all_reduce)(struct TandemWorld*, void* data, int64_t elements, int dtype, int op,
                     bool encoded, struct TandemError*);
  /// This rank's rows of the sum over ranks of `data` [rows, columns].
  bool (*reduce_scatter)(struct TandemWorld*, void* data, void* shard, int64_t rows,
                         int64_t columns, int dtype, int op, bool encoded, struct TandemError*);
  /// All ranks' rows, of `row_bytes` bytes.
  bool (*all_gather)(struct TandemWorld*, const void* shard, void* out, int64_t rows,
                     int64_t row_bytes, struct TandemError*);
  /// Counts are rows for, and from, each rank.
  bool (*all_to_all)(struct TandemWorld*, const void* send, const int64_t* send_counts, void* recv,
                     const int64_t* recv_counts, int64_t row_bytes, struct TandemError*);
  bool (*broadcast)(struct TandemWorld*, void* data, uint64_t bytes, int root, struct TandemError*);
  /// Begins to send or to receive a message, matched in order per sender and tag. Any thread.
  bool (*post)(struct TandemWorld*, const struct TandemMessage*, struct TandemError*);
  /// GPU ranks: sends and receives `count` messages concurrently, matched in order per pair of
  /// ranks.
  bool (*exchange)(struct TandemWorld*, const struct TandemGpuMessage*, int count,
                   struct TandemError*);
  /// GPU ranks: fails if a call has failed on the GPU so far.
  bool (*check)(struct TandemWorld*, struct TandemError*);
  /// GPU ranks: blocks until all calls have ended, then as `check`.
  bool (*synchronize)(struct TandemWorld*, struct TandemError*);
};

}  // extern "C"
