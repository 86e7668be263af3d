// SIGSEGV asks a pager before any other handler: what it let leave comes back when it is touched.

#pragma once

namespace lms {

class Pager;

// Have faults go to `pager` from now on. The handler that is installed last is called first, so do this again after
// other code has installed one. A fault that is not the pager's goes to the handler
// that was there before.
void take_faults(Pager* pager);

// Put back the handler that was there before.
void leave_faults();

}  // namespace lms
