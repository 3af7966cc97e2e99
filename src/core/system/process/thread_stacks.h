// Stacks of this process's other threads, for errors that explain why a rank is late.
#pragma once

#include <sys/types.h>
#include <string>

namespace tandem {

/// Kernel thread id of this thread.
pid_t this_thread_id();

/// Functions on the stack of thread `id` of this process, innermost first: "read < copy < main".
/// Functions without a name: their file and offset. Empty if the thread has ended or does not
/// answer within 0.2 s. Uses SIGURG, unless the program handles it.
std::string stack_of_thread(pid_t id);

}  // namespace tandem
