// A replacement of operator new that fails on request.
#pragma once

namespace tandem::test {

/// Makes this thread's next allocation throw bad_alloc.
void fail_next_allocation();
/// True until that allocation has failed.
bool allocation_will_fail();

}  // namespace tandem::test
