//! Values that stand outside of a context's arena: none.

#[derive(Debug, Default)]
pub(crate) struct BoxedValues {}

impl BoxedValues {
    pub(crate) fn value(&self, _at: usize) -> Option<&[u8]> {
        None
    }

    pub(crate) fn clear(&mut self) {}
}
